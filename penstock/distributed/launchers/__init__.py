"""Launchers of worker processes: on this machine, through Ray, or by the user."""

from typing import TYPE_CHECKING

from penstock.front_door import lazily

if TYPE_CHECKING:
    from penstock.distributed.launchers.base import Launcher as Launcher, WorkerExit as WorkerExit
    from penstock.distributed.launchers.factory import make_launcher as make_launcher

__getattr__ = lazily(__name__, __file__)

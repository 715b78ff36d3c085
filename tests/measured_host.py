"""A small valid description of a host, for tests that keep and show one."""

from __future__ import annotations

from penstock.machines import MachineDescription


def host(name: str = "here", rate: float = 1.5e9, spread: float = 0.0) -> MachineDescription:
    """Return a host with a curve of every shape that the page shows."""

    def curve(work: str, *rates: float, sizes=(1.0,), **more) -> dict:
        return {"work": work, "sizes": list(sizes), "rates": list(rates), **more}

    return MachineDescription.model_validate(
        {
            "name": name,
            "title": "A processor, 2 cores",
            "kind": "host",
            "processor": "A processor",
            "engine": {
                "is_host": True,
                "operator_seconds": 4e-6,
                "stage_seconds": 25e-6,
                "rates": [
                    curve("product", 1e9, 9.5e10, sizes=(16, 2048), layout="tokens", spread=0.031),
                    curve("sparse product", 2e10, sizes=(0.1,), dtype="bfloat16"),
                    curve("attention", 3e10, sizes=(512,)),
                    curve("pointwise", rate, sizes=(65536,), spread=spread),
                ],
            },
            "store": {
                "memory": "8GiB",
                "cores": 2,
                "rates": [curve("update", 4e9)],
                "flash": {
                    "size": "100GiB",
                    "both": 2**30,
                    "rates": [
                        curve("flash read", 2**31, sizes=(1 << 20,)),
                        curve("flash write", 2**29, sizes=(1 << 20,)),
                    ],
                },
            },
            "sources": {"rates": "measured"},
        }
    )

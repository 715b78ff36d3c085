"""The name under which people start workers: `python -m penstock.cluster.worker`."""

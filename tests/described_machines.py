"""Descriptions of two small machines, and a run that is planned on them."""

RATES = [{"work": "product", "rates": [1e11]}, {"work": "pointwise", "rates": [1e10]}]
STORE = {"memory": "24GiB", "rates": [{"work": "update", "rates": [1e10]}]}
DESK = {"name": "desk", "kind": "host", "engine": {"is_host": True, "rates": RATES}, "store": STORE}
RACK = {
    "name": "rack",
    "kind": "cluster",
    "engine": {"memory": "1GiB", "rates": RATES},
    "store": STORE,
    "link": {"weights": 1e9, "gradients": 1e9},
}
TINY = {"model": "tiny", "batch": {"size": 8, "micro": 1}, "data": {"sequence_length": 32}}

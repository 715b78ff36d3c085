"""The reference page of machines, generated from the models and from the library's files.

`python -m penstock.machines.reference > docs/machines.md` writes it; a test compares the two.
"""

from penstock.config import Section, field_table
from penstock.machines.description import (
    Accuracy,
    EnginePart,
    FlashPart,
    LinkPart,
    MachineDescription,
    ProcessesPart,
    StorePart,
)
from penstock.machines.figures import figure_keys, figures
from penstock.machines.gpu_cluster import (
    GpuCluster,
    GpuPart,
    NetworkPart,
    NodePart,
    PeakRate,
    ProductRate,
    known_gpu_clusters,
    load_gpu_cluster,
)
from penstock.machines.load import known_machines, load_machine
from penstock.machines.rates import RateCurve

_HEAD = """\
# Machines

The planner predicts a run on a machine that a YAML file describes: one store, equal engines, and
the links between them. `penstock plan CONFIG --machine NAME` takes a machine of the
[library](#the-library), `--machine FILE.yaml` one of your own. This machine is measured by
`penstock calibrate`, which writes the same kind of file.

In Python: `penstock.machines.load_machine("cs2")` or `load_machine("rack.yaml")`; `dump(machine)`
returns the YAML.

This page is made from the code and from the library's files:
`python -m penstock.machines.reference > docs/machines.md`.

## How to write a machine file

```yaml
# rack.yaml
name: rack
kind: cluster
engine:
  memory: 64GiB                # of one engine
  rates:
    - {work: product, dtype: float32, sizes: [64, 256, 1024], rates: [0.4e12, 0.9e12, 1.2e12]}
    - {work: product, dtype: bfloat16, rates: [2.4e12]}
    - {work: pointwise, rates: [100e9]}
store:
  memory: 256GiB               # of all hosts of the store
  rates:
    - {work: update, rates: [100e9]}
link:
  weights: 1.2e9               # bytes per second to one engine
  gradients: 1.2e9
  fan_out: 2
sources:
  engine.rates.product.float32: "measured: GEMM of the vendor's library, 2026-11"
```

1. An engine has at least the work `product` and `pointwise`, a store `update`, a disk `flash read`
   and `flash write`. Work without a curve takes the rate of similar work, as [below](#curves) says.
2. A rate is in FLOP/s for products, attention and heads, where a multiply-add counts as two. All
   other rates are in bytes/s, bytes read and bytes written together.
3. If the engine is the processor of the store's host, write `engine.is_host: true` and leave `link`
   and `engine.memory` out.
4. A key under `sources` is the key of the figure. For a curve it is `engine.rates.WORK` or
   `engine.rates.WORK.DTYPE`.
5. What is wrong with a file is reported at once, one line per problem with its line number.
   Problems between several keys are reported after problems of single values are solved.
6. `accuracy` is for machines on which predictions were compared with runs. Without it a prediction
   has no interval.
"""

_CURVES = """\
A curve gives the rate by the size of a call. It is constant beyond its first and last size. Between
two sizes log(rate) is interpolated linearly over log(size).

| work | rate | size of a call | without a curve of its own |
|---|---|---|---|
| `product` | FLOP/s | smallest dimension | required |
| `sparse product` | FLOP/s of kept entries | share of kept entries, up to 1 | `product` |
| `attention` | FLOP/s | length of the sequence | `product` |
| `head` | FLOP/s | tokens | `product` |
| `norm`, `activation`, `reduction`, `lookup` | bytes/s | bytes | `pointwise` |
| `copy` | bytes/s | bytes | `pointwise`; in a store: `update` |
| `pointwise` | bytes/s | bytes | required |
| `update` | bytes/s of weights, moments and gradients | bytes | required |
| `receive` | bytes/s of gradients | bytes | `update` |
| `checksum` | bytes/s | bytes | `update` |
| `flash read`, `flash write` | bytes/s | bytes of one call | required of a disk |
| `shared memory`, `socket` | bytes/s one way | bytes of a message | required of processes |

In place of another curve, `product` gives the rate at a dimension of the operator's products.

- `sparse product`: the smallest of tokens, inputs and outputs; if these are unknown, the largest
  size of the curve. The rate is that of the dense product, so that sparsity saves time in
  proportion to its FLOPs.
- `attention`: the length of the sequence; `head`: the tokens. The features of a head of attention
  and the hidden features are unknown; where they are fewer, the rate is that of larger products.
"""

_LIBRARY = """\
Every figure has one source, and the source begins with its basis:

| basis | the figure |
|---|---|
| published | stands in a data sheet, a paper or a report, which is named |
| measured | was measured on a machine, which is named |
| derived | follows from published or measured figures, which are named |
| assumed | is a guess, with its reason |
| unknown | is null, because nothing was found |

Where sources conflict, the source of the figure names the others. No prediction was compared with
runs of Penstock on these machines, so none has an `accuracy`; `benchmarks/published_rows.py`
compares `cs2` with published figures.
"""

_GPU_CLUSTERS = """\
A conventional cluster, which computes with data, tensor and pipeline parallelism and holds weights
on its GPUs: for comparison. `penstock plan CONFIG --machine a100-cluster engines=64` predicts the
step of 64 GPUs with the best degrees. A file with the key `gpu` describes one; start from a file of
the folder `penstock/machines/gpu_clusters`.
"""


def markdown() -> str:
    """Return the whole page."""
    parts = [_HEAD]
    nested = {"engine", "store", "link", "processes", "accuracy"}
    for title, part, apart in (
        ("Keys of a machine", MachineDescription, nested),
        ("`engine`", EnginePart, set()),
        ("`store`", StorePart, {"flash"}),
        ("`store.flash`", FlashPart, set()),
        ("`link`", LinkPart, set()),
        ("`processes`", ProcessesPart, set()),
        ("`accuracy`", Accuracy, set()),
    ):
        parts.append(f"## {title}\n\n{_keys(part, apart)}")
    parts.append(f"## Curves\n\n{_CURVES}\n{_keys(RateCurve, set())}")
    parts.append(f"## The library\n\n{_LIBRARY}")
    parts += [_machine(name) for name in known_machines()]
    parts.append(f"## GPU clusters\n\n{_GPU_CLUSTERS}")
    gpu_parts: tuple[tuple[str, type[Section]], ...] = (
        ("`gpu`", GpuPart),
        ("`node`", NodePart),
        ("`network`", NetworkPart),
        ("A peak rate", PeakRate),
        ("A rate of `gpu.products`", ProductRate),
    )
    parts.append(f"### Keys of a GPU cluster\n\n{_keys(GpuCluster, {'gpu', 'node', 'network'})}")
    parts += [f"### {title}\n\n{_keys(section, set())}" for title, section in gpu_parts]
    parts += [_gpu_cluster(name) for name in known_gpu_clusters()]
    return "\n".join(parts)


def _keys(part: type[Section], nested: set[str]) -> str:
    return field_table((key, i) for key, i in part.model_fields.items() if key not in nested)


def _machine(name: str) -> str:
    machine = load_machine(name)
    known = figures(machine)
    lines = [
        f"### {name}\n",
        f"{machine.title[:1].upper()}{machine.title[1:]}.\n",
        "| figure | value | basis | source |",
        "|---|---|---|---|",
    ]
    for key in figure_keys(machine):
        if key in machine.sources:
            basis, _, text = machine.sources[key].partition(": ")
            lines.append(f"| `{key}` | {known.get(key, 'null')} | {basis} | {text} |")
    return "\n".join(lines) + "\n"


def _gpu_cluster(name: str) -> str:
    cluster = load_gpu_cluster(name)
    lines = [f"### {name}\n", f"{cluster.title}.\n", "| figure | basis | source |", "|---|---|---|"]
    for key, source in cluster.sources.items():
        basis, _, text = source.partition(": ")
        lines.append(f"| `{key}` | {basis} | {text} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")

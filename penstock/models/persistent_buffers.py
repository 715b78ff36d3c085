"""The buffers of a module that its `state_dict()` contains."""

from penstock.models.origin import WeightSource


def persistent_buffers(origin: WeightSource) -> dict[str, str]:
    """Return the first name of every buffer in the `state_dict()` of a model, by each of its names.

    `save_pretrained` of `transformers` leaves out the tensors in `_keys_to_ignore_on_save`, and so
    does this function.
    """
    first = {id(tensor): name for name, tensor in origin.names.buffers.items()}
    left_out = getattr(origin.module, "_keys_to_ignore_on_save", None) or ()
    return {
        name: first[id(value)]
        for name, value in origin.module.state_dict(keep_vars=True).items()
        if id(value) in first and name not in left_out
    }

"""Dropout of a model, set wherever its family has it; its configuration stays what it was."""

from torch import nn

from memguard.errors import ModelError


def set_dropout(model: nn.Module, share: float) -> int:
    """Set every dropout of a model and return how many there are.

    transformers keeps them as `torch.nn.Dropout`, or as a number on the layer that hands it to a
    function, and never reads the configuration again.

    Args:
        model: on one process; ranks that share activations would drop different ones.
        share: of the activations that are dropped in training.

    Raises:
        ModelError: a family without dropout.
    """
    num_set = 0
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = share
            num_set += 1
        for name, value in list(vars(module).items()):
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, share)
                num_set += 1
    if not num_set:
        raise ModelError(
            f"'train.dropout' does nothing: {type(model).__name__} has no dropout. Leave it out"
        )
    return num_set

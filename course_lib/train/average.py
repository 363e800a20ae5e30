"""A moving average of the weights (EMA): smoother than the weights themselves, evaluated and saved beside them."""

from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


class Average:
    """average = decay * average + (1 - decay) * weights after each step, BatchNorm's statistics included.

    Every rank computes the same from the same weights, so nothing is sent. With a decay of 0 nothing is kept.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.of = module
        self.model: AveragedModel | None = None
        if decay:
            self.model = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)

    @property
    def module(self) -> nn.Module | None:
        """The averaged network, with the keys of the network itself; None when nothing is kept."""
        return self.model.module if self.model else None

    def update(self) -> None:
        """After each step of the optimizer; the first one is taken as it is."""
        if self.model:
            self.model.update_parameters(self.of)

    def resume(self, state: dict, step: int) -> None:
        """Take the average of a checkpoint, of `step` updates."""
        if self.model:
            self.model.module.load_state_dict(state)
            self.model.n_averaged.fill_(step)

"""Cells of recurrent networks: CUDA has each as one kernel, the CPU none. Gates are packed as PyTorch does it."""

from __future__ import annotations

import torch
from torch import Tensor


def register(library: torch.library.Library) -> None:
    """Register them for the CUDA device, as long as the library lives."""
    library.impl("_thnn_fused_gru_cell", _gru, "CUDA")
    library.impl("_thnn_fused_gru_cell_backward", _gru_backward, "CUDA")
    library.impl("_thnn_fused_lstm_cell", _lstm, "CUDA")
    library.impl("_thnn_fused_lstm_cell_backward_impl", _lstm_backward, "CUDA")


def _with_bias(gates: Tensor, bias: Tensor | None) -> Tensor:
    return gates if bias is None else gates + bias


def _gru(
    of_input: Tensor, of_hidden: Tensor, before: Tensor, input_bias: Tensor | None, hidden_bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    own, past = (
        _with_bias(gates, bias).chunk(3, 1) for gates, bias in ((of_input, input_bias), (of_hidden, hidden_bias))
    )
    reset, update = (own[0] + past[0]).sigmoid(), (own[1] + past[1]).sigmoid()
    new = (own[2] + reset * past[2]).tanh()
    return new + update * (before - new), torch.cat([reset, update, new, before, past[2]], 1)


def _gru_backward(grad: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Tensor | None, ...]:
    reset, update, new, before, past = workspace.chunk(5, 1)
    of_new = grad * (1 - update) * (1 - new * new)
    of_reset = of_new * past * (1 - reset) * reset
    of_update = grad * (before - new) * (1 - update) * update
    of_input = torch.cat([of_reset, of_update, of_new], 1)
    of_hidden = torch.cat([of_reset, of_update, of_new * reset], 1)
    biases = (of_input.sum(0), of_hidden.sum(0)) if has_bias else (None, None)
    return of_input, of_hidden, grad * update, *biases


def _lstm(
    of_input: Tensor, of_hidden: Tensor, cell: Tensor, input_bias: Tensor | None, hidden_bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    gates = _with_bias(of_input, input_bias) + _with_bias(of_hidden, hidden_bias)
    take, forget, new, out = gates.chunk(4, 1)
    take, forget, new, out = take.sigmoid(), forget.sigmoid(), new.tanh(), out.sigmoid()
    after = forget * cell + take * new
    return out * after.tanh(), after, torch.cat([take, forget, new, out], 1)


def _lstm_backward(
    grad: Tensor | None, cell_grad: Tensor | None, cell: Tensor, after: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor | None, ...]:
    if grad is None and cell_grad is None:
        return None, None, None
    take, forget, new, out = workspace.chunk(4, 1)
    grad = torch.zeros_like(cell) if grad is None else grad
    squashed = after.tanh()
    of_cell = grad * out * (1 - squashed * squashed) + (0 if cell_grad is None else cell_grad)
    of_gates = [
        of_cell * new * (1 - take) * take,
        of_cell * cell * (1 - forget) * forget,
        of_cell * take * (1 - new * new),
        grad * squashed * (1 - out) * out,
    ]
    gates = torch.cat(of_gates, 1)
    return gates, of_cell * forget, gates.sum(0) if has_bias else None

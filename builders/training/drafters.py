"""The drafters that can be trained. Parameter names are those of the published formats.

All share one view: `features(...)[k][:, t]` is what the lm_head reads to predict token t + 2 + k, given
the target's states of rows up to t and the tokens up to t + 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from builders.training.features import Batch
from builders.training.layers import Chain, Layer, LayerShape, RMSNorm

__all__ = ["METHODS", "DraftModel", "Drafter", "Eagle", "Eagle3", "Medusa", "Target"]

Guess = Callable[[int, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Target:
    """What drafters take from the target and never change.

    `embedding` [V, H], `lm_head` [V, H]; `norm` [H] is the weight of the final norm.
    """

    embedding: torch.Tensor
    lm_head: torch.Tensor
    norm: torch.Tensor


class Drafter(nn.Module):
    """What the training loop needs of a method.

    `vocabulary` [Vd] are the target's token ids that training counts; `draft_ids` those that the
    drafter can say when it drafts (None: every token).
    """

    needs_taps = False
    feature_loss = 0.0

    def __init__(self, target: Target, vocabulary: torch.Tensor) -> None:
        super().__init__()
        self.target = target
        self.vocabulary = vocabulary
        self.rows = target.lm_head[vocabulary]

    @property
    def draft_ids(self) -> torch.Tensor | None:
        """Token ids that the drafter can say."""
        return None

    def depth(self, most: int, share: float) -> int:
        """Steps of a chain to train, of `most`, when `share` of the run is done."""
        return most

    def features(self, batch: Batch, steps: int, guess: Guess | None = None) -> list[torch.Tensor]:
        """What the lm_head reads at steps 0..steps-1, each [B, T, H].

        `guess(k, features)` gives the token ids [B, T] that step k + 1 reads after step k; without it
        the conversation's own tokens are read (an accepted draft is one of those).
        """
        raise NotImplementedError

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        return functional.embedding(ids, self.target.embedding)


def shift(x: torch.Tensor, by: int) -> torch.Tensor:
    """Row t becomes row t + by of `x` [B, T, ...]; zeros where that is behind the end."""
    return torch.cat([x[:, by:], torch.zeros_like(x[:, :by])], dim=1) if by else x


class ResBlock(nn.Module):
    """x + SiLU(linear(x)), the identity at first."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Same shape as `x`."""
        out: torch.Tensor = x + functional.silu(self.linear(x))
        return out


class Medusa(Drafter):
    """Heads on the target's last hidden state, head h for token t + 2 + h; lm_head shared."""

    def __init__(self, target: Target, vocabulary: torch.Tensor, heads: int, layers: int) -> None:
        super().__init__(target, vocabulary)
        size = target.embedding.shape[1]
        self.layers = layers
        self.heads = nn.ModuleList(
            nn.Sequential(*(ResBlock(size) for _ in range(layers))) for _ in range(heads)
        )

    def features(self, batch: Batch, steps: int, guess: Guess | None = None) -> list[torch.Tensor]:
        """See `Drafter.features`; Medusa reads no tokens."""
        return [head(batch.hidden.float()) for head in self.heads[:steps]]


class _Recurrent(Drafter):
    """A drafter that reads (token t + 1 + k, its own state of step k - 1)."""

    def depth(self, most: int, share: float) -> int:
        """The first step must be good before the next can learn from it, and each one costs."""
        if share < 0.2:
            return 1
        return min(2, most) if share < 0.5 else most

    def _first(self, batch: Batch) -> torch.Tensor:
        """The state that step 0 reads, [B, T, H]."""
        raise NotImplementedError

    def _step(self, token: torch.Tensor, state: torch.Tensor, chain: Chain) -> torch.Tensor:
        """The next state from token embeddings and the last one, each [B, T, H]."""
        raise NotImplementedError

    def _read_out(self, state: torch.Tensor) -> torch.Tensor:
        """What the lm_head reads."""
        return state

    def features(self, batch: Batch, steps: int, guess: Guess | None = None) -> list[torch.Tensor]:
        """See `Drafter.features`."""
        chain = Chain()
        state = self._first(batch)
        tokens = shift(batch.ids, 1)
        found = []
        for k in range(steps):
            state = self._step(self._embed(tokens), state, chain)
            found.append(self._read_out(state))
            tokens = shift(batch.ids, k + 2) if guess is None else guess(k, found[-1])
        return found


def _pass_on(fc: nn.Linear, size: int) -> None:
    """Begin with an fc that passes its last `size` inputs on, so that the lm_head sees sense at once."""
    with torch.no_grad():
        fc.weight[:, -size:] += torch.eye(size)


class Eagle(_Recurrent):
    """EAGLE-1: fc over (token embedding, hidden state), one decoder layer without input norm."""

    feature_loss = 0.1

    def __init__(self, target: Target, vocabulary: torch.Tensor, shape: LayerShape) -> None:
        super().__init__(target, vocabulary)
        self.fc = nn.Linear(2 * shape.hidden, shape.hidden)
        self.layers = nn.ModuleList([Layer(shape)])
        _pass_on(self.fc, shape.hidden)

    def _first(self, batch: Batch) -> torch.Tensor:
        return batch.hidden.float()

    def _step(self, token: torch.Tensor, state: torch.Tensor, chain: Chain) -> torch.Tensor:
        mixed = self.fc(torch.cat([token, state], dim=-1))
        out: torch.Tensor = self.layers[0](mixed, mixed, chain)
        return out


class _MidLayer(Layer):
    """A layer whose attention reads a token and a state, each with its norm."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__(shape, 2 * shape.hidden)
        self.hidden_norm = RMSNorm(shape.hidden, shape.eps)
        self.input_layernorm = RMSNorm(shape.hidden, shape.eps)


class Eagle3(_Recurrent):
    """EAGLE-3: three taps, attention over (token, state), a vocabulary of its own."""

    needs_taps = True

    def __init__(self, target: Target, vocabulary: torch.Tensor, shape: LayerShape) -> None:
        super().__init__(target, vocabulary)
        self.fc = nn.Linear(3 * shape.hidden, shape.hidden, bias=False)
        self.midlayer = _MidLayer(shape)
        self.norm = RMSNorm(shape.hidden, shape.eps)
        _pass_on(self.fc, shape.hidden)
        with torch.no_grad():
            self.norm.weight.copy_(target.norm)

    @property
    def draft_ids(self) -> torch.Tensor | None:
        """The reduced vocabulary."""
        return self.vocabulary

    def _first(self, batch: Batch) -> torch.Tensor:
        assert batch.taps is not None
        state: torch.Tensor = self.fc(batch.taps.float())
        return state

    def _step(self, token: torch.Tensor, state: torch.Tensor, chain: Chain) -> torch.Tensor:
        read = torch.cat([self.midlayer.input_layernorm(token), self.midlayer.hidden_norm(state)], dim=-1)
        out: torch.Tensor = self.midlayer(state, read, chain)
        return out

    def _read_out(self, state: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(state)
        return out


class _DecoderLayer(Layer):
    """A layer as in the target."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__(shape)
        self.input_layernorm = RMSNorm(shape.hidden, shape.eps)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, H] → [B, T, H]."""
        out: torch.Tensor = self(x, self.input_layernorm(x), Chain())
        return out


class _Decoder(nn.Module):
    """The body of a Llama model, embeddings aside."""

    def __init__(self, shape: LayerShape, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_DecoderLayer(shape) for _ in range(layers))
        self.norm = RMSNorm(shape.hidden, shape.eps)


class DraftModel(Drafter):
    """A small Llama on the target's embeddings, begun as the target's first layers and its last."""

    def __init__(self, target: Target, vocabulary: torch.Tensor, shape: LayerShape, layers: int) -> None:
        super().__init__(target, vocabulary)
        self.model = _Decoder(shape, layers)

    def begin_as(self, weights: Mapping[str, torch.Tensor], num_layers: int) -> None:
        """Take over the target's layers where sizes agree; `weights` are the target's, by name."""
        layers = len(self.model.layers)
        sources = [*range(layers - 1), num_layers - 1]
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parts = name.split(".")
                if parts[0] == "layers":
                    parts[1] = str(sources[int(parts[1])])
                source = weights.get("model." + ".".join(parts))
                if source is not None and source.shape == parameter.shape:
                    parameter.copy_(source)

    def depth(self, most: int, share: float) -> int:
        """Step k is step 0 of a later row: one step trains them all."""
        return 1

    def features(self, batch: Batch, steps: int, guess: Guess | None = None) -> list[torch.Tensor]:
        """See `Drafter.features`; at every step the same tokens are read."""
        x = self._embed(batch.ids)
        for layer in self.model.layers:
            assert isinstance(layer, _DecoderLayer)
            x = layer.run(x)
        out = self.model.norm(x)
        return [shift(out, 1 + k) for k in range(steps)]


METHODS = ("medusa", "eagle", "eagle3", "draft_model")

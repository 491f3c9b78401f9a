"""Delta-net models with a drafting block once more, in plain NumPy and double precision, from the description of the
format alone: hidden states of the trunk, and the logits of chains of drafts.

    h       trunk of x_0 .. x_p, behind the output norm
    row p   eh_proj [rms(embed(x_p), enorm) ; rms(h_{p-1}, hnorm)], h_{-1} = 0; then a layer with attention over the
            rows 0 .. p of the block itself, at rotary position p; its normed output gives logits, and stands for h_p
            when the next row is a draft

Names and shapes are those of GGUF; numbers by their keys without the architecture. Nothing of the package is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Doubles = npt.NDArray[np.float64]


def rms(x: Doubles, weight: Doubles | float, eps: float) -> Doubles:
    return np.asarray(x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight)


def sigmoid(x: Doubles) -> Doubles:
    return np.asarray(1 / (1 + np.exp(-x)))


def silu(x: Doubles) -> Doubles:
    return x * sigmoid(x)


def softmax(x: Doubles) -> Doubles:
    powers = np.exp(x - x.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))


@dataclass
class Oracle:
    """`arch` says in what order value heads lie; `facts` and `weights` are those of the file."""

    arch: str
    facts: Mapping[str, Any]
    weights: Mapping[str, Doubles]

    @property
    def trunk(self) -> int:
        return int(self.facts["block_count"]) - int(self.facts["nextn_predict_layers"])

    @property
    def eps(self) -> float:
        return float(self.facts["attention.layer_norm_rms_epsilon"])

    def _is_recurrent(self, layer: int) -> bool:
        return layer < self.trunk and bool((layer + 1) % int(self.facts["full_attention_interval"]))

    def _of(self, layer: int, name: str) -> Doubles:
        return self.weights[f"blk.{layer}.{name}"]

    def hidden(self, tokens: Sequence[int]) -> Doubles:
        """Behind the output norm, `[tokens, hidden]`."""
        x = self.weights["token_embd.weight"][list(tokens)]
        for layer in range(self.trunk):
            normed = rms(x, self._of(layer, "attn_norm.weight"), self.eps)
            if self._is_recurrent(layer):
                x = x + self._delta(layer, normed)
            else:
                q, k, v, gate = self._heads(layer, normed, np.arange(len(tokens)))
                x = x + self._attend(layer, q, k, v, gate)
            x = x + self._feed(layer, x)
        return rms(x, self.weights["output_norm.weight"], self.eps)

    def logits(self, hidden: Doubles) -> Doubles:
        head = self.weights.get("output.weight", self.weights["token_embd.weight"])
        return np.asarray(hidden @ head.T)

    def chains(self, tokens: Sequence[int], drafts: int) -> tuple[Doubles, npt.NDArray[np.int64]]:
        """Of the rows at every position: logits `[positions, drafts, vocab]` of a chain that begins with the token
        there and goes on with the likeliest ones, and these tokens `[positions, drafts]`."""
        layer, hidden = self.trunk, self.hidden(tokens)
        before = np.concatenate([np.zeros_like(hidden[:1]), hidden[:-1]])
        rows = self._inputs(tokens, before)
        _, keys, values, _ = self._heads(layer, rms(rows, self._of(layer, "attn_norm.weight"), self.eps))
        found, drafted = [], []
        for at in range(len(tokens)):
            chain, likeliest = self._chain(tokens[at], before[at], keys[:at], values[:at], drafts)
            found.append(chain)
            drafted.append(likeliest)
        return np.array(found), np.array(drafted)

    def _chain(
        self, token: int, before: Doubles, keys: Doubles, values: Doubles, drafts: int
    ) -> tuple[list[Doubles], list[int]]:
        layer, found, drafted = self.trunk, [], [int(token)]
        for _ in range(drafts):
            x = self._inputs(drafted[-1:], before[None])
            normed = rms(x, self._of(layer, "attn_norm.weight"), self.eps)
            q, k, v, gate = self._heads(layer, normed, np.array([len(keys)]))
            keys, values = np.concatenate([keys, k]), np.concatenate([values, v])
            x = x + self._attend(layer, q, keys, values, gate)
            x = x + self._feed(layer, x)
            norm = self.weights.get(f"blk.{layer}.nextn.shared_head_norm.weight", self.weights["output_norm.weight"])
            before = rms(x, norm, self.eps)[0]
            head = self.weights.get(f"blk.{layer}.nextn.shared_head_head.weight")
            found.append(self.logits(before) if head is None else before @ head.T)
            drafted.append(int(np.argmax(found[-1])))
        return found, drafted[1:]

    def _inputs(self, tokens: Sequence[int], before: Doubles) -> Doubles:
        layer = self.trunk
        table = self.weights.get(f"blk.{layer}.nextn.embed_tokens.weight", self.weights["token_embd.weight"])
        embedded = rms(table[list(tokens)], self._of(layer, "nextn.enorm.weight"), self.eps)
        hidden = rms(before, self._of(layer, "nextn.hnorm.weight"), self.eps)
        return np.asarray(np.concatenate([embedded, hidden], -1) @ self._of(layer, "nextn.eh_proj.weight").T)

    # ---------------------------------------------------------------------------------------------------------- layers

    def _feed(self, layer: int, x: Doubles) -> Doubles:
        x = rms(x, self._of(layer, "post_attention_norm.weight"), self.eps)
        if f"blk.{layer}.ffn_gate.weight" in self.weights:
            return self._gated(x, *(self._of(layer, f"ffn_{part}.weight") for part in ("gate", "up", "down")))
        shares = softmax(x @ self._of(layer, "ffn_gate_inp.weight").T)
        count, used = shares.shape[1], int(self.facts["expert_used_count"])
        stacks = [self._of(layer, f"ffn_{part}_exps.weight") for part in ("gate", "up", "down")]
        matrices = [stack.reshape(count, -1, stack.shape[-1]) for stack in stacks]
        routed = np.zeros_like(x)
        for row, own in enumerate(shares):
            best = np.argsort(-own, kind="stable")[:used]
            for expert in best:
                part = self._gated(x[row : row + 1], *(matrix[expert] for matrix in matrices))
                routed[row] += own[expert] / own[best].sum() * part[0]
        shared = self._gated(x, *(self._of(layer, f"ffn_{part}_shexp.weight") for part in ("gate", "up", "down")))
        return routed + sigmoid(x @ self._of(layer, "ffn_gate_inp_shexp.weight").reshape(1, -1).T) * shared

    def _gated(self, x: Doubles, gate: Doubles, up: Doubles, down: Doubles) -> Doubles:
        return np.asarray((silu(x @ gate.T) * (x @ up.T)) @ down.T)

    def _heads(
        self, layer: int, x: Doubles, positions: npt.NDArray[np.int64] | None = None
    ) -> tuple[Doubles, Doubles, Doubles, Doubles]:
        """q, k, v `[rows, heads, dim]` and the gate `[rows, heads * dim]`."""
        positions = np.arange(len(x)) if positions is None else positions
        dim = int(self.facts["attention.key_length"])
        both = (x @ self._of(layer, "attn_q.weight").T).reshape(len(x), -1, 2 * dim)
        k, v = ((x @ self._of(layer, f"attn_{part}.weight").T).reshape(len(x), -1, dim) for part in "kv")
        q = self._turned(rms(both[..., :dim], self._of(layer, "attn_q_norm.weight"), self.eps), positions)
        k = self._turned(rms(k, self._of(layer, "attn_k_norm.weight"), self.eps), positions)
        return q, k, v, both[..., dim:].reshape(len(x), -1)

    def _turned(self, heads: Doubles, positions: npt.NDArray[np.int64]) -> Doubles:
        half = int(self.facts["rope.dimension_count"]) // 2
        base = float(self.facts.get("rope.freq_base", 10000.0))
        turn = np.exp(1j * positions[:, None, None] * base ** (-np.arange(half) / half))
        turned = (heads[..., :half] + 1j * heads[..., half : 2 * half]) * turn
        return np.concatenate([turned.real, turned.imag, heads[..., 2 * half :]], -1)

    def _attend(self, layer: int, q: Doubles, k: Doubles, v: Doubles, gate: Doubles) -> Doubles:
        """The rows of q are the last ones of k."""
        shared = q.shape[1] // k.shape[1]
        k, v = (each.repeat(shared, axis=1) for each in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[-1])
        later = np.arange(len(k))[None] > np.arange(len(k) - len(q), len(k))[:, None]
        scores[:, later] = -np.inf
        mixed = np.einsum("hqk,khd->qhd", softmax(scores), v).reshape(len(q), -1)
        return np.asarray((mixed * sigmoid(gate)) @ self._of(layer, "attn_output.weight").T)

    def _delta(self, layer: int, x: Doubles) -> Doubles:
        keys, values = int(self.facts["ssm.group_count"]), int(self.facts["ssm.time_step_rank"])
        dim, wide = int(self.facts["ssm.state_size"]), int(self.facts["ssm.inner_size"]) // values
        taps, mixed = self._of(layer, "ssm_conv1d.weight"), x @ self._of(layer, "attn_qkv.weight").T
        width = taps.shape[1]
        padded = np.concatenate([np.zeros((width - 1, mixed.shape[1])), mixed])
        passed = silu(sum(padded[tap : tap + len(x)] * taps[:, tap] for tap in range(width)))
        q, k = (passed[:, at : at + keys * dim].reshape(len(x), keys, dim) for at in (0, keys * dim))
        v = passed[:, 2 * keys * dim :].reshape(len(x), values, wide)
        q, k = (each / np.sqrt((each * each).sum(-1, keepdims=True) + self.eps) for each in (q, k))
        share = values // keys
        if self.arch == "qwen3next":
            q, k = (each.repeat(share, axis=1) for each in (q, k))
        else:
            q, k = (np.tile(each, (1, share, 1)) for each in (q, k))
        beta, alpha = self._gates(layer, x, keys, share)
        keep = np.exp(np.logaddexp(0, alpha + self._of(layer, "ssm_dt.bias")) * self._of(layer, "ssm_a"))
        state, out = np.zeros((values, dim, wide)), np.empty_like(v)
        for at in range(len(x)):
            state = state * keep[at][:, None, None]
            change = sigmoid(beta[at])[:, None] * (v[at] - np.einsum("hdw,hd->hw", state, k[at]))
            state = state + k[at][:, :, None] * change[:, None]
            out[at] = np.einsum("hdw,hd->hw", state, q[at]) / np.sqrt(dim)
        z = (x @ self._of(layer, "attn_gate.weight").T).reshape(out.shape)
        normed = rms(out, self._of(layer, "ssm_norm.weight"), self.eps) * silu(z)
        return np.asarray(normed.reshape(len(x), -1) @ self._of(layer, "ssm_out.weight").T)

    def _gates(self, layer: int, x: Doubles, keys: int, share: int) -> tuple[Doubles, Doubles]:
        """Logits of beta and alpha, by value head; in one tensor they lie by key head, those of beta first."""
        if f"blk.{layer}.ssm_ba.weight" not in self.weights:
            beta, alpha = (x @ self._of(layer, f"ssm_{part}.weight").T for part in ("beta", "alpha"))
            return beta, alpha
        both = (x @ self._of(layer, "ssm_ba.weight").T).reshape(len(x), keys, 2, share)
        return both[:, :, 0].reshape(len(x), -1), both[:, :, 1].reshape(len(x), -1)


def read(path: str) -> Oracle:
    """A GGUF file of floats."""
    import gguf

    reader = gguf.GGUFReader(path)
    arch = str(reader.fields["general.architecture"].contents())
    facts = {key.removeprefix(f"{arch}."): value.contents() for key, value in reader.fields.items()}
    weights = {
        each.name: np.asarray(each.data, np.float64).reshape([int(n) for n in reversed(each.shape)])
        for each in reader.tensors
    }
    return Oracle(arch, facts, {name: each[:] for name, each in weights.items()})

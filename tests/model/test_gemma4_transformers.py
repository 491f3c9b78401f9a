"""gemma4 in all its forms against `transformers`: tensors handed over in memory, named as in GGUF files."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from backends.base import PAGE_LEN, Batch, Limits, OpenOptions, ReceiveRows, SendRows, TensorView
from backends.quant import QuantType
from backends.reference.backend import ReferenceBackend
from backends.registry import open_backend
from homeserve.layouts.share import Share
from homeserve.models import registry
from homeserve.models.bind import Bound, bind

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

LAYERS, HIDDEN, VOCAB, ROWS, WINDOW = 6, 64, 200, 25, 6
KINDS = ["sliding_attention", "sliding_attention", "full_attention"] * 2
TOLERANCE = 1e-4
"""Logits lie within +-4, and scores are not scaled: 5e-5 is what float32 leaves of them."""

NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "router.proj": "ffn_gate_inp",
    "experts.gate_up_proj": "ffn_gate_up_exps",
    "experts.down_proj": "ffn_down_exps",
    "layer_scalar": "layer_output_scale",
    "self_attn.o_proj": "attn_output",
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    **{f"self_attn.{part}_norm": f"attn_{part}_norm" for part in "qk"},
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
}
BARE = {"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"}
ROUTED = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 40}
GLOBAL = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "embed_tokens_per_layer": "per_layer_token_embd",
    "per_layer_model_projection": "per_layer_model_proj",
    "per_layer_projection_norm": "per_layer_proj_norm",
}
FORMS = {
    "dense": {"hidden_size_per_layer_input": 0},
    "v from k": {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "inputs by token": {"hidden_size_per_layer_input": 16},
    "shared kv": {"hidden_size_per_layer_input": 16, "num_kv_shared_layers": 3},
    "experts": {"hidden_size_per_layer_input": 0, **ROUTED},
    "experts and inputs by token": {"hidden_size_per_layer_input": 16, "num_kv_shared_layers": 3, **ROUTED},
    "all of it": {
        "hidden_size_per_layer_input": 16,
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
    },
}


class Made:
    """A random model of `transformers`, its logits, and its tensors and settings as a GGUF file would have them."""

    def __init__(self, form: dict[str, Any]) -> None:
        config = transformers.Gemma4TextConfig(
            vocab_size=VOCAB,
            vocab_size_per_layer_input=VOCAB,
            hidden_size=HIDDEN,
            intermediate_size=96,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            global_head_dim=32,
            sliding_window=WINDOW,
            layer_types=KINDS,
            final_logit_softcapping=30.0,
            max_position_embeddings=512,
            **form,
        )
        torch.manual_seed(7)
        model = transformers.Gemma4ForCausalLM(config).float().eval()
        with torch.no_grad():
            for name, weights in model.named_parameters():
                noise = torch.randn_like(weights)
                weights.copy_(1 + 0.2 * noise if "norm" in name or "scale" in name else 0.1 * noise)
            for name, value in model.named_buffers():
                if name.endswith("layer_scalar"):
                    value.copy_(0.5 + torch.rand_like(value))
            self.ids = torch.randint(1, VOCAB, (1, ROWS))
            self.logits = model(input_ids=self.ids).logits[0].numpy()
        self.tensors = dict(self._tensors(model))
        self.config = registry.family("gemma4").config_from(self._metadata(form))

    def _tensors(self, model: Any) -> Any:
        for name, values in model.state_dict().items():
            if name == "lm_head.weight":
                continue
            stem = name.removeprefix("model.").removesuffix(".weight")
            if stem.startswith("layers."):
                _, layer, part = stem.split(".", 2)
                target = f"blk.{layer}.{BARE[part] if part in BARE else f'{NAMES[part]}.weight'}"
            else:
                target = f"{GLOBAL[stem]}.weight"
            yield target, _view(target, values.numpy())
        # A quarter of a wide head's 32 dims turns: four pairs of sixteen.
        factors = np.where(np.arange(16) < 4, 1.0, 1e30)
        yield "rope_freqs.weight", _view("rope_freqs.weight", factors)

    def _metadata(self, form: dict[str, Any]) -> dict[str, Any]:
        shared = form.get("num_kv_shared_layers", 0)
        wide = 2 if form.get("use_double_wide_mlp") else 1
        few = form.get("num_global_key_value_heads", 2)
        keys = {
            "block_count": LAYERS,
            "context_length": 512,
            "embedding_length": HIDDEN,
            "feed_forward_length": [96 * (wide if layer >= LAYERS - shared else 1) for layer in range(LAYERS)],
            "attention.head_count": 4,
            "attention.head_count_kv": [2 if kind.startswith("sliding") else few for kind in KINDS],
            "attention.key_length": 32,
            "attention.value_length": 32,
            "attention.key_length_swa": 16,
            "attention.value_length_swa": 16,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "attention.sliding_window": WINDOW,
            "attention.sliding_window_pattern": [kind.startswith("sliding") for kind in KINDS],
            "attention.shared_kv_layers": shared,
            "rope.freq_base": 1e6,
            "rope.freq_base_swa": 1e4,
            "rope.dimension_count": 32,
            "rope.dimension_count_swa": 16,
            "embedding_length_per_layer_input": form["hidden_size_per_layer_input"],
            "final_logit_softcapping": 30.0,
            "vocab_size": VOCAB,
        }
        if "num_experts" in form:
            keys |= {"expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": 40}
        return {f"gemma4.{name}": value for name, value in keys.items()}

    def bound(self, share: Share | None = None) -> Bound:
        return bind(registry.family("gemma4"), self.config, self.tensors, share)


def _view(name: str, values: np.ndarray) -> TensorView:
    dense = np.ascontiguousarray(values, np.float32).reshape(-1, values.shape[-1])
    return TensorView(name, QuantType.F32, *dense.shape, np.frombuffer(dense.tobytes(), np.uint8))


def run_on_cpu(made: Made, chunks: tuple[int, ...]) -> np.ndarray:
    """Logits of the prompt on the CPU backend, chunk by chunk."""
    pages, bound = -(-ROWS // PAGE_LEN), made.bound()
    pool = bound.kv_pool(pages * PAGE_LEN, QuantType.F32)
    backend = open_backend("cpu", OpenOptions(threads=2))
    program = backend.bind(bound.ops, bound.weights, pool, Limits(ROWS, ROWS, 1, pages), _quiet)
    logits = [program.run(batch(made, first, end)).copy() for first, end in pairwise((0, *np.cumsum(chunks)))]
    program.close()
    backend.close()
    return np.concatenate(logits)


def batch(made: Made, first: int, end: int) -> Batch:
    rows, groups = np.arange(first, end, dtype=np.int32), 1 + len(made.bound().windows)
    return Batch(
        tokens=made.ids[0].numpy().astype(np.int32)[first:end],
        positions=rows,
        slots=np.tile(rows, (groups, 1)),
        lanes=np.zeros_like(rows),
        tables=np.tile(np.arange(-(-ROWS // PAGE_LEN), dtype=np.int32), (groups, 1, 1)),
        logit_rows=rows - first,
    )


def run(made: Made, ranks: list[range], chunks: tuple[int, ...] = (ROWS,)) -> np.ndarray:
    """Logits of the prompt through ranks in a row, chunk by chunk."""
    pages = -(-ROWS // PAGE_LEN)
    programs = []
    for rank in range(len(ranks)):
        bound = made.bound(Share.pipeline(rank, [(at.start, at.stop) for at in ranks]))
        pool = bound.kv_pool(pages * PAGE_LEN, QuantType.F32)
        limits = Limits(ROWS, ROWS, 1, pages)
        within = [op for op in bound.ops if not isinstance(op, SendRows | ReceiveRows)]
        programs.append((bound, ReferenceBackend(OpenOptions()).bind(within, bound.weights, pool, limits, _quiet)))
    logits = []
    for first, end in pairwise((0, *np.cumsum(chunks))):
        given: dict[str, np.ndarray] = {}
        for bound, program in programs:
            buffers = program.run_from(batch(made, first, end), given)
            given = {buffer.name: buffers[buffer.name] for buffer in bound.gives}
        logits.append(buffers["logits"])
    return np.concatenate(logits)


def _quiet(*_: object) -> None:
    pass


@pytest.mark.parametrize("form", FORMS)
def test_logits_are_those_of_transformers(form: str) -> None:
    made = Made(FORMS[form])
    whole = run(made, [range(LAYERS)])
    assert np.abs(whole - made.logits).max() < TOLERANCE
    assert np.array_equal(run(made, [range(LAYERS)], (7, 1, 13, 4)), whole), "chunks change no bit"
    on_cpu = run_on_cpu(made, (ROWS,))
    assert np.abs(on_cpu - made.logits).max() < TOLERANCE
    assert np.array_equal(run_on_cpu(made, (7, 1, 13, 4)), on_cpu)
    assert len(made.bound().kv_layers) == LAYERS - FORMS[form].get("num_kv_shared_layers", 0)


@pytest.mark.parametrize("form", ["inputs by token", "experts"])
def test_ranks_in_a_row_are_the_whole_model(form: str) -> None:
    made = Made(FORMS[form])
    whole = run(made, [range(LAYERS)])
    for cut in (1, 3, 5):
        assert np.array_equal(run(made, [range(cut), range(cut, LAYERS)]), whole)

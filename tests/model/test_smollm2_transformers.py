"""The default model against an independent forward pass: `transformers` on the dequantised weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from backends.reference.dequant import dequantise
from homeserve.text.tokenizer import Tokenizer

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

# Loading torch, and the oracle on one core of a busy machine.
pytestmark = pytest.mark.timeout(300)

PROMPTS = (
    "The capital of France is Paris, and the capital of Italy is",
    "import numpy as np\n\ndef softmax(x):\n    ",
    "¿Qué hora es? Das weiß ich nicht. 今日は 🙂",
)
ROLES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@pytest.fixture(scope="module")
def prompts(smollm2_reference: Any) -> list[list[int]]:
    tokenizer = Tokenizer.from_checkpoint(smollm2_reference.checkpoint)
    return [list(tokenizer.encode(text)) for text in PROMPTS]


@pytest.fixture(scope="module")
def oracle(smollm2_reference: Any, prompts: list[list[int]]) -> list[np.ndarray]:
    """Logits of transformers for every position of every prompt."""
    model = build(smollm2_reference)
    with torch.no_grad():
        return [model(torch.tensor([tokens])).logits[0].numpy() for tokens in prompts]


def test_reference_logits_are_those_of_transformers(
    smollm2_reference: Any, prompts: list[list[int]], oracle: list[np.ndarray], measured: Callable[[str], None]
) -> None:
    for text, tokens, expected in zip(PROMPTS, prompts, oracle, strict=True):
        got = smollm2_reference.logits(tokens)
        error = float(np.abs(got - expected).max())
        measured(f"SmolLM2 on reference, {text[:20]!r}: logits within {error:.1e} of transformers")
        assert error < 1e-3
        assert np.array_equal(got.argmax(axis=1), expected.argmax(axis=1))


def test_cpu_logits_are_those_of_transformers_within_the_error_of_the_type(
    smollm2_cpu: Any, prompts: list[list[int]], oracle: list[np.ndarray], measured: Callable[[str], None]
) -> None:
    """`cpu` rounds activations to 8 bits: the distributions agree to a small divergence."""
    got = np.concatenate([smollm2_cpu.logits(tokens) for tokens in prompts])
    expected = np.concatenate(oracle)
    divergence = float(np.mean(kl(expected, got)))
    equal = float(np.mean(got.argmax(axis=1) == expected.argmax(axis=1)))
    measured(f"SmolLM2 on cpu against transformers: mean KL {divergence:.2e}, best token equal {equal:.1%}")
    # The third prompt is of languages that the model hardly knows: flat distributions, which rounding moves more.
    assert divergence < 0.02
    assert equal > 0.9


def build(reference: Any) -> Any:
    """LlamaForCausalLM with the file's weights, dequantised; rows of q and k back in the order of halves."""
    config = reference.bound.config
    settings = transformers.LlamaConfig(
        vocab_size=config.vocab,
        hidden_size=config.hidden,
        intermediate_size=config.ffn,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.context,
        rms_norm_eps=config.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope.base},
        tie_word_embeddings=config.tied_head,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(settings)
    tensors = reference.checkpoint.tensors
    state = {
        "model.embed_tokens.weight": dequantise(tensors["token_embd.weight"]),
        "model.norm.weight": dequantise(tensors["output_norm.weight"])[0],
    }
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    for layer in range(config.layers):
        for role, name in ROLES.items():
            dense = dequantise(tensors[f"blk.{layer}.{role}.weight"])
            if role in ("attn_q", "attn_k"):
                dense = halves(dense, config.head_dim)
            state[f"model.layers.{layer}.{name}.weight"] = dense[0] if "norm" in role else dense
    weights = {name: torch.from_numpy(dense.copy()) for name, dense in state.items()}
    model.load_state_dict(weights, strict=True, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config=settings)
    return model.eval()


def halves(dense: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows of each head from neighbouring pairs (2i, 2i+1) to halves (i, i + head_dim/2)."""
    heads = dense.reshape(-1, head_dim // 2, 2, dense.shape[1])
    return heads.transpose(0, 2, 1, 3).reshape(dense.shape)


def kl(expected: np.ndarray, got: np.ndarray) -> np.ndarray:
    """KL(expected || got) of the softmax distributions by position, in nats."""
    p, q = (torch.log_softmax(torch.from_numpy(x).double(), dim=-1).numpy() for x in (expected, got))
    return np.asarray(np.sum(np.exp(p) * (p - q), axis=1))

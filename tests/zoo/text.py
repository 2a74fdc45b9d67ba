"""Models of text, and of text with pictures or sound."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from zoo.entry import BATCH, Call, Entry, hugging_face, layers, samples
from zoo.vision import VIT


def mask(length: int, batch: int = BATCH) -> Tensor:
    """Return a mask of sequences that are padded on the right to different lengths."""
    lengths = torch.tensor([length - (2 * k) % (length // 2) for k in range(batch)])
    return (torch.arange(length) < lengths[:, None]).long()


def tokens(length: int, vocabulary: int, batch: int = BATCH) -> Tensor:
    return torch.randint(3, vocabulary, (batch, length))


def text(length: int = 12, vocabulary: int = 50, **more: Any) -> Call:
    """Return a batch of padded sequences whose labels skip the padding."""
    seen = mask(length)
    ids = torch.where(seen.bool(), tokens(length, vocabulary), 0)
    return (), {"input_ids": ids, "attention_mask": seen, "labels": ids.masked_fill(seen == 0, -100), **more}


def labelled(call: dict[str, Any]) -> float:
    """Count the labels that a loss looks at."""
    return float((call["labels"] != -100).sum())


def predicted(call: dict[str, Any]) -> float:
    """Count the labels that a causal model predicts: all but the first of each sequence."""
    return float((call["labels"][:, 1:] != -100).sum())


LLAMA = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SEQUENCES = {
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}


def causal(name: str, model: str, config: str, options: dict[str, Any] | None = None, **settings: Any) -> Entry:
    """Return a decoder like Llama: rotary positions, no dropout, labels that it shifts itself."""
    build = hugging_face(model, config, **{**LLAMA, **settings})
    return Entry(name, build, text, layers("model.layers"), predicted, options or {})


def weigh_predicted(**call: Any) -> float:
    """Weigh the loss of a micro-batch whose auxiliary part is no mean, which a pipeline would warn of."""
    return predicted(call)


def _translated() -> Call:
    _, call = text()
    target = mask(8)
    labels = tokens(8, 50).masked_fill(target == 0, -100)
    return (), {**call, "labels": labels}


def _spoken() -> Call:
    labels = tokens(8, 50).masked_fill(mask(8) == 0, -100)
    return (), {"input_features": torch.randn(BATCH, 8, 32), "labels": labels}


def _captioned() -> Call:
    seen = mask(7)
    ids = torch.where(seen.bool(), tokens(7, 49), 0)
    ids[torch.arange(BATCH), seen.sum(1) - 1] = 49  # where each text ends
    return (), {
        "input_ids": ids,
        "pixel_values": torch.randn(BATCH, 3, 16, 16),
        "attention_mask": seen,
        "return_loss": True,
    }


def _asked() -> Call:
    """A picture in front of each text: 4 patches, each a token of the kind 49."""
    _, call = text(vocabulary=49)
    call["input_ids"][:, 1:5] = 49
    call["labels"][:, :5] = -100
    return (), {"pixel_values": torch.randn(BATCH, 3, 16, 16), **call}


def _llava() -> nn.Module:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    vision = CLIPVisionConfig(**{**VIT, "num_hidden_layers": 3}, attention_dropout=0.0)
    config = LlavaConfig(
        vision_config=vision,
        text_config=LlamaConfig(**{**LLAMA, "num_hidden_layers": 3}),
        image_token_index=49,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
    )
    return LlavaForConditionalGeneration(config)


def _clip() -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    writing = {
        "vocab_size": 50,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 16,
        "eos_token_id": 49,
        "bos_token_id": 1,
        "pad_token_id": 0,
    }
    seeing = {**VIT, "num_hidden_layers": 2}
    return CLIPModel(CLIPConfig(text_config=writing, vision_config=seeing, projection_dim=8))


def _transformer(batch_first: bool) -> nn.Module:
    with warnings.catch_warnings(action="ignore"):  # of nested tensors, if not batch_first
        return nn.Transformer(16, 2, 2, 2, 24, dropout=0.0, batch_first=batch_first)


def _masked_sequences(batch_first: bool) -> Call:
    source, target = torch.randn(BATCH, 9, 16), torch.randn(BATCH, 7, 16)
    padding = mask(9) == 0
    if not batch_first:
        source, target = source.transpose(0, 1).contiguous(), target.transpose(0, 1).contiguous()
    square = nn.Transformer.generate_square_subsequent_mask(7)
    return (source, target), {
        "tgt_mask": square,
        "tgt_is_causal": True,
        "src_key_padding_mask": padding,
        "memory_key_padding_mask": padding.clone(),
    }


GPT2 = hugging_face(
    "GPT2LMHeadModel",
    "GPT2Config",
    vocab_size=50,
    n_embd=16,
    n_layer=4,
    n_head=2,
    n_positions=32,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
    bos_token_id=1,
    eos_token_id=2,
)
MOE = {"options": {"loss_weight": weigh_predicted}, "num_experts_per_tok": 2, "output_router_logits": True}

TEXT = [
    Entry("GPT-2", GPT2, text, layers("transformer.h"), predicted),
    causal("Llama", "LlamaForCausalLM", "LlamaConfig"),
    causal("Mistral", "MistralForCausalLM", "MistralConfig", sliding_window=6),
    causal("Qwen3", "Qwen3ForCausalLM", "Qwen3Config", head_dim=4, tie_word_embeddings=True),
    causal("Gemma2", "Gemma2ForCausalLM", "Gemma2Config", head_dim=4, sliding_window=6, query_pre_attn_scalar=4),
    causal("Mixtral", "MixtralForCausalLM", "MixtralConfig", num_local_experts=4, **MOE),
    causal(
        "Qwen3-MoE",
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        head_dim=4,
        moe_intermediate_size=12,
        num_experts=4,
        **MOE,
    ),
    Entry(
        "BERT",
        hugging_face(
            "BertForMaskedLM",
            "BertConfig",
            vocab_size=50,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=4,
            num_attention_heads=2,
            max_position_embeddings=32,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        ),
        text,
        layers("bert.encoder.layer"),
        labelled,
    ),
    Entry(
        "T5",
        hugging_face(
            "T5ForConditionalGeneration",
            "T5Config",
            vocab_size=50,
            d_model=16,
            d_kv=8,
            d_ff=24,
            num_layers=2,
            num_heads=2,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        ),
        _translated,
        ("encoder.block.1", "decoder.block.0", "decoder.block.1"),
        labelled,
    ),
    Entry(
        "BART",
        hugging_face(
            "BartForConditionalGeneration", "BartConfig", vocab_size=50, max_position_embeddings=32, **SEQUENCES
        ),
        _translated,
        ("model.encoder.layers.1", "model.decoder.layers.0", "model.decoder.layers.1"),
        labelled,
    ),
    Entry(
        "Whisper",
        hugging_face(
            "WhisperForConditionalGeneration",
            "WhisperConfig",
            vocab_size=50,
            num_mel_bins=8,
            max_source_positions=16,
            max_target_positions=16,
            **SEQUENCES,
        ),
        _spoken,
        ("model.encoder.layers.1", "model.decoder.layers.0", "model.decoder.layers.1"),
        labelled,
    ),
    Entry(
        "Mamba",
        hugging_face(
            "MambaForCausalLM",
            "MambaConfig",
            vocab_size=50,
            hidden_size=16,
            state_size=4,
            num_hidden_layers=4,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        ),
        text,
        layers("backbone.layers"),
        predicted,
    ),
    Entry(
        "CLIP",
        _clip,
        _captioned,
        ("vision_model.encoder.layers.1", "text_model", "text_model.encoder.layers.1"),
        samples,
        {"loss_weight": "samples"},  # its loss compares the samples of a micro-batch with each other
    ),
    Entry(
        "LLaVA",
        _llava,
        _asked,
        (
            "model.vision_tower.encoder.layers.1",
            "model.language_model.layers.0",
            "model.language_model.layers.2",
        ),
        predicted,
    ),
    Entry(
        "nn.Transformer",
        functools.partial(_transformer, True),
        functools.partial(_masked_sequences, True),
        ("encoder.layers.1", "decoder.layers.0", "decoder.layers.1"),
        needs="torch",
    ),
    Entry(
        "nn.Transformer, sequence first",
        functools.partial(_transformer, False),
        functools.partial(_masked_sequences, False),
        ("encoder.layers.1", "decoder.layers.0", "decoder.layers.1"),
        options={"batch_dim": {"src": 1, "tgt": 1, "output": 1}},
        output_dim=1,
        needs="torch",
    ),
]

"""Networks of transformers and diffusers, random weights and small inputs.

Each function imports its package when it is called and gives {name: Network}.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from third_party import Network, image, repair_torchvision, tokens
from torch import Tensor, nn

__all__ = ["HUGGING_FACE"]


def first(output: Any) -> Any:
    """Return what transformers call logits, or the last hidden state."""
    return output[0]


def transformers() -> dict[str, Network]:
    repair_torchvision()
    import transformers as hf

    small: dict[str, Any] = {
        "vocab_size": 50,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": 32,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }

    def one(kind: str, inputs: Any = None, tiles: str = "", **options: Any) -> Network:
        model = getattr(hf, kind)
        config = model.config_class

        def make() -> nn.Module:
            net: nn.Module = model(config(**options))
            return net

        return Network(make, inputs or tokens(12), tiles, first)

    def pictures(kind: str, size: int = 64, **options: Any) -> Network:
        return one(kind, image(3, size, size), "2x2", **options)

    few = {k: v for k, v in small.items() if k not in ("pad_token_id",)}
    vit = {
        key: small[key]
        for key in (
            "hidden_size", "num_hidden_layers", "num_attention_heads",
            "intermediate_size",
        )
    }  # fmt: skip
    names = (
        "BertForMaskedLM AlbertModel RobertaModel ElectraModel LlamaForCausalLM "
        "DebertaV2Model MobileBertModel GPTNeoXForCausalLM MistralForCausalLM "
        "Qwen2ForCausalLM GemmaForCausalLM PhiForCausalLM OPTForCausalLM MPNetModel"
    )
    special: dict[str, dict[str, Any]] = {
        "AlbertModel": {"embedding_size": 16},
        "MistralForCausalLM": {"num_key_value_heads": 2},
        "Qwen2ForCausalLM": {"num_key_value_heads": 2},
        "GemmaForCausalLM": {"num_key_value_heads": 2, "head_dim": 8},
        "OPTForCausalLM": {"ffn_dim": 64, "word_embed_proj_dim": 32},
        "MobileBertModel": {
            "intra_bottleneck_size": 16, "true_hidden_size": 16, "embedding_size": 16
        },
    }  # fmt: skip
    nets = {name: one(name, **small | special.get(name, {})) for name in names.split()}
    t5: dict[str, Any] = {
        "vocab_size": 50, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2,
        "num_heads": 4,
    }  # fmt: skip
    bart: dict[str, Any] = {
        "vocab_size": 50, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4,
        "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 32,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "decoder_start_token_id": 1,
    }  # fmt: skip

    def pair(n: int) -> dict[str, Tensor]:
        source, target = tokens(12, 8)(n)
        return {"input_ids": source, "decoder_input_ids": target}

    def captioned(n: int) -> dict[str, Tensor]:
        ids = torch.cat([tokens(11)(n)[0], torch.full((n, 1), 49)], dim=1)
        return {"input_ids": ids, "pixel_values": torch.randn(n, 3, 32, 32)}

    clip = {
        "text_config": few | {"eos_token_id": 49},
        "vision_config": vit | {"image_size": 32, "patch_size": 8},
        "projection_dim": 16,
    }
    speech = {
        "vocab_size": 50, **vit, "conv_dim": (8, 8), "conv_stride": (5, 2),
        "conv_kernel": (10, 3), "num_conv_pos_embeddings": 8,
        "num_feat_extract_layers": 2,
        "num_conv_pos_embedding_groups": 2, "apply_spec_augment": False,
        "feat_extract_norm": "layer",
    }  # fmt: skip
    return nets | {
        "GPT2LMHeadModel": one(
            "GPT2LMHeadModel", vocab_size=50, n_embd=32, n_layer=4, n_head=4,
            n_positions=32,
        ),
        "BloomForCausalLM": one(
            "BloomForCausalLM", vocab_size=50, hidden_size=32, n_layer=4, n_head=4
        ),
        "FalconForCausalLM": one("FalconForCausalLM", **few),
        "DistilBertModel": one(
            "DistilBertModel", vocab_size=50, dim=32, n_layers=4, n_heads=4,
            hidden_dim=64,
        ),
        "XLNetModel": one(
            "XLNetModel", vocab_size=50, d_model=32, n_layer=3, n_head=4, d_inner=64
        ),
        "MambaForCausalLM": one(
            "MambaForCausalLM", vocab_size=50, hidden_size=16, num_hidden_layers=3,
            state_size=4,
        ),
        "T5ForConditionalGeneration": one("T5ForConditionalGeneration", pair, **t5),
        "BartForConditionalGeneration": one(
            "BartForConditionalGeneration", pair, **bart
        ),
        "WhisperModel": one(
            "WhisperModel",
            lambda n: {
                "input_features": torch.randn(n, 8, 24),
                "decoder_input_ids": tokens(6)(n)[0],
            },
            **bart | {"num_mel_bins": 8, "max_source_positions": 12},
            max_target_positions=16,
        ),
        "CLIPModel": Network(
            lambda: hf.CLIPModel(hf.CLIPConfig(**clip)),
            captioned,
            "",
            lambda out: (out.text_embeds, out.image_embeds),
        ),
        "Wav2Vec2Model": one("Wav2Vec2Model", image(800), **speech),
        "ViTModel": pictures("ViTModel", **vit, image_size=64),
        "DeiTModel": pictures("DeiTModel", **vit, image_size=64),
        "BeitModel": pictures("BeitModel", **vit, image_size=64),
        "Dinov2Model": pictures(
            "Dinov2Model", image_size=64, patch_size=8, hidden_size=32,
            num_hidden_layers=3, num_attention_heads=4,
        ),
        "SwinModel": pictures(
            "SwinModel", image_size=64, embed_dim=16, depths=[2, 2], num_heads=[2, 2],
            window_size=4,
        ),
        "ConvNextModel": pictures(
            "ConvNextModel", hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 2, 1]
        ),
        "SegformerForSemanticSegmentation": pictures(
            "SegformerForSemanticSegmentation", hidden_sizes=[8, 16, 16, 32],
            depths=[1, 1, 1, 1], decoder_hidden_size=16,
            num_attention_heads=[1, 2, 2, 2],
        ),
        "ResNetForImageClassification": pictures(
            "ResNetForImageClassification", embedding_size=8,
            hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1],
        ),
        "PoolFormerModel": pictures(
            "PoolFormerModel", hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1]
        ),
    }  # fmt: skip


def diffusers() -> dict[str, Network]:
    repair_torchvision()
    import diffusers as hub

    noisy: dict[str, Any] = {"in_channels": 3, "out_channels": 3, "norm_num_groups": 4}
    wide: dict[str, Any] = {"block_out_channels": (8, 16), "layers_per_block": 1}
    block = {"num_attention_heads": 4, "attention_head_dim": 8}

    def one(kind: str, inputs: Any, tiles: str = "2x2", **options: Any) -> Network:
        return Network(lambda: getattr(hub, kind)(**options), inputs, tiles)

    def at_a_time(*shape: int, **more: Any) -> Callable[[int], dict[str, Tensor]]:
        def inputs(n: int) -> dict[str, Tensor]:
            time = {"timestep": torch.randint(1000, (n,))}
            made = {name: give(n) for name, give in more.items()}
            return {next(iter(made), "sample"): torch.randn(n, *shape), **time, **made}

        return inputs

    def noised(n: int) -> dict[str, Tensor]:
        return {
            "sample": torch.randn(n, 3, 32, 32), "timestep": torch.randint(1000, (n,))
        }  # fmt: skip

    def guided(n: int) -> dict[str, Tensor]:
        return noised(n) | {"encoder_hidden_states": torch.randn(n, 6, 16)}

    def labelled(n: int) -> dict[str, Tensor]:
        return {
            "hidden_states": torch.randn(n, 4, 16, 16),
            "timestep": torch.randint(1000, (n,)),
            "class_labels": torch.randint(10, (n,)),
        }

    def prompted(n: int) -> dict[str, Tensor]:
        return {
            "hidden_states": torch.randn(n, 4, 16, 16),
            "encoder_hidden_states": torch.randn(n, 6, 16),
            "pooled_projections": torch.randn(n, 16),
            "timestep": torch.randint(1000, (n,)),
        }

    kl = noisy | wide | {
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
    }  # fmt: skip
    return {
        "UNet2DModel": one(
            "UNet2DModel", noised, **noisy, **wide, attention_head_dim=8,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        ),
        "UNet2DConditionModel": one(
            "UNet2DConditionModel", guided, **noisy, **wide, cross_attention_dim=16,
            attention_head_dim=4,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        ),
        "AutoencoderKL": one("AutoencoderKL", image(3, 32, 32), **kl),
        "AutoencoderTiny": one(
            "AutoencoderTiny", image(3, 32, 32), encoder_block_out_channels=(8,) * 4,
            decoder_block_out_channels=(8,) * 4,
        ),
        "VQModel": one("VQModel", image(3, 32, 32), **kl, num_vq_embeddings=16),
        "DiTTransformer2DModel": one(
            "DiTTransformer2DModel", labelled, **block, num_layers=3, sample_size=16,
            num_embeds_ada_norm=1000,
        ),
        "SD3Transformer2DModel": one(
            "SD3Transformer2DModel", prompted, **block, num_layers=3, sample_size=16,
            in_channels=4, joint_attention_dim=16, caption_projection_dim=32,
            pooled_projection_dim=16, out_channels=4,
        ),
    }  # fmt: skip


HUGGING_FACE: dict[str, Callable[[], dict[str, Network]]] = {
    "transformers": transformers,
    "diffusers": diffusers,
}

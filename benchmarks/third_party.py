"""Vision networks that others wrote, random weights and small inputs: by package.

Each function imports its package when it is called and gives {name: Network}.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["VISION", "Network", "image", "repair_torchvision", "tokens"]


def everything(output: Any) -> Any:
    """Return the whole output."""
    return output


@dataclass(frozen=True)
class Network:
    """A network; `inputs(n)` gives n samples, `part` what the loss is computed of.

    `tiles` is the grid on which its images are split, "" if it takes none.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[int], Any]
    tiles: str = "2x2"
    part: Callable[[Any], Any] = everything


def image(*shape: int) -> Callable[[int], tuple[Tensor, ...]]:
    """Return the function that gives n images, or volumes."""
    return lambda n: (torch.randn(n, *shape),)


def tokens(*lengths: int, vocabulary: int = 50) -> Callable[[int], tuple[Tensor, ...]]:
    """Return the function that gives n rows of tokens of each length."""
    return lambda n: tuple(torch.randint(3, vocabulary, (n, size)) for size in lengths)


def repair_torchvision() -> None:
    """Let torchvision be imported beside a torch that its own operators do not fit."""
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        boxes = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        library.define(f"nms{boxes}")
        library.define(f"qnms{boxes}")
        _KEPT.append(library)
        importlib.import_module("torchvision")


_KEPT: list[object] = []


def torchvision() -> dict[str, Network]:
    repair_torchvision()
    from torchvision import models

    def one(name: str, size: int = 64, shape: Any = None, **options: Any) -> Network:
        options = {"weights": None, "num_classes": 10, **options}
        make = getattr(models, name, None) or getattr(
            models.segmentation, name, getattr(models.video, name, None)
        )
        grid = "2x2x1" if shape and len(shape) == 4 else "2x2"
        shape = shape or (3, size, size)
        return Network(lambda: make(**options), image(*shape), grid)

    names = (
        "resnet18 resnet50 resnext50_32x4d densenet121 squeezenet1_1 mobilenet_v2 "
        "mobilenet_v3_small shufflenet_v2_x0_5 efficientnet_b0 "
        "efficientnet_v2_s regnet_x_400mf regnet_y_400mf convnext_tiny swin_t swin_v2_t"
    )
    networks = {name: one(name) for name in names.split()}
    aside: dict[str, Any] = {"weights_backbone": None}
    clip = (3, 4, 32, 32)
    return networks | {
        "alexnet": one("alexnet", 96),
        "vgg11_bn": one("vgg11_bn"),
        "googlenet": one("googlenet", 96, init_weights=False),
        "inception_v3": one("inception_v3", 128, init_weights=False, aux_logits=False),
        "vit_b_16": one("vit_b_16", image_size=64),
        "fcn_resnet50": one("fcn_resnet50", **aside),
        "deeplabv3_resnet50": one("deeplabv3_resnet50", **aside, aux_loss=True),
        "lraspp_mobilenet_v3_large": one("lraspp_mobilenet_v3_large", **aside),
        "r3d_18": one("r3d_18", shape=clip),
        "r2plus1d_18": one("r2plus1d_18", shape=clip),
    }


_TIMM = (
    "cait_xxs24_224:64 coat_tiny:64 coatnet_pico_rw_224:64 convit_tiny:64 "
    "convnext_atto:64 convnextv2_atto:64 deit_tiny_patch16_224:64 densenet121:64 "
    "dla34:64 eca_resnet33ts:64 edgenext_xx_small:64 efficientformer_l1:224 "
    "efficientformerv2_s0:224 efficientnet_b0:64 efficientvit_b0:64 "
    "efficientvit_m0:128 eva02_tiny_patch14_224:70 fasternet_t0:64 fastvit_t8:64 "
    "gcvit_xxtiny:128 ghostnet_050:64 hgnetv2_b0:64 hrnet_w18_small:64 "
    "inception_next_atto:64 lambda_resnet26t:128 levit_128s:64 mambaout_femto:64 "
    "maxvit_rmlp_pico_rw_256:64 mixer_s16_224:64 mixnet_s:64 mobilenetv3_small_050:64 "
    "mobilenetv4_conv_small:64 mobileone_s0:64 mobilevit_xxs:64 mvitv2_tiny:64 "
    "nf_resnet26:64 pit_ti_224:64 poolformer_s12:64 pvt_v2_b0:64 regnetz_005:64 "
    "repghostnet_050:64 repvgg_a0:64 repvit_m0_9:64 res2net50_26w_4s:64 resnest14d:64 "
    "resnetv2_50:64 rexnet_100:64 selecsls42:64 seresnet18:64 shvit_s1:64 "
    "skresnet18:64 starnet_s1:64 swiftformer_xs:64 swin_tiny_patch4_window7_224:56 "
    "swinv2_cr_tiny_224:64 tf_efficientnetv2_b0:64 tiny_vit_5m_224:224 tinynet_e:64 "
    "twins_svt_small:64 visformer_tiny:64 vit_tiny_patch16_224:64 volo_d1_224:64 "
    "xception41:64 xcit_nano_12_p16_224:64"
)


def timm() -> dict[str, Network]:
    repair_torchvision()
    import timm

    sized = (
        "cait coat_ coatnet convit deit efficientvit_m eva02 gcvit levit maxvit mixer "
        "mvitv2 pit swin twins visformer vit_tiny volo"
    )

    def one(name: str, size: int) -> Network:
        options: dict[str, Any] = {"num_classes": 10}
        if name.startswith(tuple(sized.split())):
            options["img_size"] = size
        return Network(lambda: timm.create_model(name, **options), image(3, size, size))

    pairs = (word.split(":") for word in _TIMM.split())
    return {name: one(name, int(size)) for name, size in pairs}


def segmentation_models_pytorch() -> dict[str, Network]:
    repair_torchvision()
    import segmentation_models_pytorch as smp

    def one(
        kind: str, encoder: str = "resnet18", size: int = 64, **more: Any
    ) -> Network:
        options = {"encoder_weights": None, "classes": 2, **more}
        return Network(
            lambda: getattr(smp, kind)(encoder, **options), image(3, size, size)
        )

    kinds = "Unet UnetPlusPlus MAnet Linknet FPN PSPNet DeepLabV3 DeepLabV3Plus UPerNet"
    networks = {kind: one(kind) for kind in kinds.split()}
    return networks | {
        "PAN": one("PAN", encoder_output_stride=16, size=128),
        "Unet scse": one("Unet", decoder_attention_type="scse"),
        "Unet efficientnet-b0": one("Unet", "efficientnet-b0"),
        "Unet mobilenet_v2": one("Unet", "mobilenet_v2"),
        "Unet mit_b0": one("Unet", "mit_b0"),
        "Unet densenet121": one("Unet", "densenet121"),
        "Unet timm-skresnet18": one("Unet", "timm-skresnet18"),
        "Unet tu-mobilenetv3_small_050": one("Unet", "tu-mobilenetv3_small_050"),
        "FPN aux": one("FPN", aux_params={"classes": 3}),
        "Segformer mit_b0": one("Segformer", "mit_b0"),
        "DPT": one("DPT", "tu-vit_tiny_patch16_224", dynamic_img_size=True),
    }


def dynamic_network_architectures() -> dict[str, Network]:
    from dynamic_network_architectures.architectures import unet

    def one(kind: str, axes: int = 2, **more: Any) -> Network:
        sizes = [4, 8, 16, 16]
        options: dict[str, Any] = {
            "input_channels": 1,
            "n_stages": 4,
            "features_per_stage": sizes,
            "conv_op": nn.Conv2d if axes == 2 else nn.Conv3d,
            "kernel_sizes": 3,
            "strides": [1, 2, 2, 2],
            "n_conv_per_stage_decoder": 2,
            "num_classes": 2,
            "conv_bias": True,
            "norm_op": nn.InstanceNorm2d if axes == 2 else nn.InstanceNorm3d,
            "norm_op_kwargs": {"eps": 1e-5, "affine": True},
            "nonlin": nn.LeakyReLU,
            "nonlin_kwargs": {"inplace": True},
            **more,
        }
        count = "n_conv_per_stage" if kind == "PlainConvUNet" else "n_blocks_per_stage"
        size, grid = ((64, 64), "2x2") if axes == 2 else ((16, 32, 32), "1x2x2")
        return Network(
            lambda: getattr(unet, kind)(**{count: 2}, **options), image(1, *size), grid
        )

    return {
        "PlainConvUNet": one("PlainConvUNet"),
        "PlainConvUNet 3d": one("PlainConvUNet", 3, deep_supervision=True),
        "ResidualEncoderUNet": one("ResidualEncoderUNet", deep_supervision=True),
        "ResidualEncoderUNet 3d": one("ResidualEncoderUNet", 3),
        "ResidualUNet": one("ResidualUNet"),
    }


def monai() -> dict[str, Network]:
    repair_torchvision()
    from monai.networks import nets

    def one(
        kind: str, *shape: int, tiles: str = "2x2", make: Any = None, **options: Any
    ) -> Network:
        shape = shape or (1, 64, 64)
        build = make or getattr(nets, kind)
        return Network(lambda: build(**options), image(*shape), tiles)

    flat: dict[str, Any] = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2}
    deep = flat | {"spatial_dims": 3}
    steps: dict[str, Any] = {"channels": (4, 8, 16), "strides": (2, 2)}
    thin = (8, 8, 16, 16, 32, 8)
    volume = (1, 16, 32, 32)
    kernels: dict[str, Any] = {
        "kernel_size": (3, 3, 3),
        "strides": (1, 2, 2),
        "upsample_kernel_size": (2, 2),
    }
    vae: dict[str, Any] = {
        "num_res_blocks": (1, 1),
        "channels": (8, 16),
        "attention_levels": (False, True),
        "norm_num_groups": 8,
    }
    diffusion = vae | {"num_head_channels": 8}
    critic: dict[str, Any] = {"channels": (4, 8, 8, 8), "strides": (2, 2, 2, 2)}
    vit: dict[str, Any] = {"hidden_size": 48, "mlp_dim": 96, "num_heads": 4}
    networks = {
        "UNet": one("UNet", **flat, **steps),
        "UNet residual": one("UNet", **flat, **steps, num_res_units=2),
        "UNet 3d": one("UNet", *volume, tiles="1x2x2", **deep, **steps),
        "BasicUNet": one("BasicUNet", **flat, features=thin),
        "BasicUNet 3d": one("BasicUNet", *volume, tiles="1x2x2", **deep, features=thin),
        "BasicUNetPlusPlus": one(
            "BasicUNetPlusPlus", **flat, features=thin, deep_supervision=True
        ),
        "AttentionUnet": one("AttentionUnet", **flat, **steps),
        "DynUNet": one("DynUNet", **flat, **kernels),
        "DynUNet supervised": one("DynUNet", **flat, **kernels, deep_supervision=True),
        "SegResNet": one("SegResNet", **flat),
        "SegResNet 3d": one("SegResNet", *volume, tiles="1x2x2", **deep),
        "SegResNetDS": one("SegResNetDS", **flat, init_filters=8, dsdepth=2),
        "SegResNetVAE": one("SegResNetVAE", **flat, input_image_size=(64, 64)),
        "VNet": one("VNet", **flat, dropout_dim=2),
        "UNETR": one("UNETR", **flat, **vit, img_size=64),
        "SwinUNETR": one(
            "SwinUNETR", **flat, feature_size=12, num_heads=(1, 2, 2, 4), window_size=4
        ),
        "DenseNet121": one("DenseNet121", **flat, init_features=16, growth_rate=8),
        "SEResNet50": one("SEResNet50", spatial_dims=2, in_channels=1, num_classes=2),
        "EfficientNetBN": one(
            "EfficientNetBN", 3, 64, 64, model_name="efficientnet-b0", pretrained=False
        ),
        "HighResNet": one("HighResNet", **flat),
        "AHNet": one("AHNet", **flat, psp_block_num=2, upsample_mode="bilinear"),
        "resnet18": one("resnet18", spatial_dims=2, n_input_channels=1, num_classes=2),
        "ViT": one(
            "ViT", in_channels=1, img_size=64, patch_size=16, spatial_dims=2, **vit,
            classification=True,
        ),
        "ViTAutoEnc": one(
            "ViTAutoEnc", in_channels=1, img_size=64, patch_size=16, spatial_dims=2,
            **vit,
        ),
        "AutoEncoder": one("AutoEncoder", **flat, **steps | {"strides": (2, 2, 1)}),
        "VarAutoEncoder": one(
            "VarAutoEncoder", spatial_dims=2, in_shape=(1, 64, 64), out_channels=1,
            latent_size=4, **steps | {"strides": (2, 2, 1)},
        ),
        "Generator": one(
            "Generator", 12, tiles="", latent_shape=(12,), start_shape=(16, 8, 8),
            channels=(8, 1), strides=(2, 2),
        ),
        "Discriminator": one("Discriminator", in_shape=(1, 64, 64), **critic),
        "Regressor": one("Regressor", in_shape=(1, 64, 64), out_shape=(2,), **critic),
        "Classifier": one("Classifier", in_shape=(1, 64, 64), classes=3, **critic),
        "Critic": one("Critic", in_shape=(1, 64, 64), **critic),
        "GlobalNet": one(
            "GlobalNet", image_size=[64, 64], spatial_dims=2, in_channels=1,
            num_channel_initial=4, depth=3,
        ),
        "LocalNet": one(
            "LocalNet", **flat, num_channel_initial=4, extract_levels=(0, 2)
        ),
        "RegUNet": one("RegUNet", **flat, num_channel_initial=4, depth=3),
        "FlexibleUNet": one(
            "FlexibleUNet", 3, 64, 64, in_channels=3, out_channels=2,
            backbone="efficientnet-b0",
        ),
        "MedNeXt": one("MedNeXt", **flat, init_filters=8, deep_supervision=True),
        "Quicknat": one("Quicknat", num_classes=3, num_filters=8),
        "AutoencoderKL": one("AutoencoderKL", 1, 32, 32, spatial_dims=2, **vae),
        "AutoencoderKL checkpointed": one(
            "AutoencoderKL", 1, 32, 32, spatial_dims=2, **vae, use_checkpoint=True
        ),
        "VQVAE": one(
            "VQVAE", 1, 32, 32, spatial_dims=2, in_channels=1, out_channels=1,
            channels=(8, 8), num_res_channels=8, num_res_layers=1, num_embeddings=8,
            embedding_dim=8, downsample_parameters=((2, 4, 1, 1),) * 2,
            upsample_parameters=((2, 4, 1, 1, 0),) * 2,
        ),
        "PatchDiscriminator": one(
            "PatchDiscriminator", spatial_dims=2, channels=8, in_channels=1,
            num_layers_d=4,
        ),
        "MultiScalePatchDiscriminator": one(
            "MultiScalePatchDiscriminator", num_d=2, num_layers_d=2, spatial_dims=2,
            channels=8, in_channels=1, minimum_size_im=64,
        ),
        "HoVerNet": one("HoVerNet", 3, 256, 256, mode="fast", out_classes=3),
        "VoxelMorphUNet": one(
            "VoxelMorphUNet", 2, 64, 64, spatial_dims=2, in_channels=2,
            unet_out_channels=2, channels=(4, 4, 8, 8, 8, 8),
            final_conv_channels=(4, 4),
        ),
        "MILModel": one(
            "MILModel", 4, 3, 32, 32, tiles="", num_classes=2, pretrained=False,
            backbone=None, mil_mode="att",
        ),
        "FullyConnectedNet": one(
            "FullyConnectedNet", 12, tiles="", in_channels=12, out_channels=3,
            hidden_channels=(16, 16), dropout=0.1,
        ),
        "VarFullyConnectedNet": one(
            "VarFullyConnectedNet", 12, tiles="", in_channels=12, out_channels=12,
            latent_size=4, encode_channels=(16, 8), decode_channels=(8, 16),
        ),
    }  # fmt: skip
    networks["DiffusionModelUNet"] = Network(
        lambda: nets.DiffusionModelUNet(**flat | {"out_channels": 1}, **diffusion),
        lambda n: (torch.randn(n, 1, 32, 32), torch.randint(1000, (n,))),
    )
    networks["DecoderOnlyTransformer"] = Network(
        lambda: nets.DecoderOnlyTransformer(50, 16, 32, 4, 4), tokens(16), ""
    )
    return networks


VISION: dict[str, Callable[[], dict[str, Network]]] = {
    function.__name__: function
    for function in (
        monai,
        torchvision,
        timm,
        segmentation_models_pytorch,
        dynamic_network_architectures,
    )
}

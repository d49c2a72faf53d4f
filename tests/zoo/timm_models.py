"""Models of `timm`, with random weights, of small images."""

from tests.zoo.real_model import RealModel, from_timm

__all__ = ["TIMM"]

TIMM: dict[str, RealModel] = {
    "ResNet-26 (timm)": from_timm("resnet26", size=64),
    "EfficientNet (timm)": from_timm("efficientnet_b0", size=64),
    "ConvNeXt (timm)": from_timm("convnext_atto", size=64),
    "ViT (timm)": from_timm("vit_tiny_patch16_224", size=32, img_size=32, depth=4),
    "Swin (timm)": from_timm(
        "swin_tiny_patch4_window7_224",
        size=32,
        img_size=32,
        window_size=4,
        embed_dim=16,
        depths=(2, 2),
        num_heads=(2, 4),
    ),
    "RegNet (timm)": from_timm("regnety_002", size=64),
    "DenseNet (timm)": from_timm("densenet121", size=64),
    "MobileNetV3 (timm)": from_timm("mobilenetv3_small_100", size=64),
    "VGG (timm)": from_timm("vgg11_bn", size=32),
    "BEiT (timm)": from_timm("beit_base_patch16_224", size=32, img_size=32, embed_dim=32, depth=4, num_heads=4),
    "MaxViT (timm)": from_timm("maxvit_rmlp_pico_rw_256", size=64, img_size=64),
    "CoAtNet (timm)": from_timm("coatnet_pico_rw_224", size=64, img_size=64),
    "HRNet (timm)": from_timm("hrnet_w18_small", size=64),
    "Inception-v4 (timm)": from_timm("inception_v4", size=96),
    "NFNet (timm)": from_timm("dm_nfnet_f0", size=64),
    "CSPDarknet (timm)": from_timm("cspdarknet53", size=64),
    "DPN (timm)": from_timm("dpn48b", size=64),
    "MLP-Mixer (timm)": from_timm("mixer_s32_224", size=64, img_size=64),
    "ResMLP (timm)": from_timm("resmlp_12_224", size=64, img_size=64),
    "PoolFormer (timm)": from_timm("poolformer_s12", size=64),
    "XCiT (timm)": from_timm("xcit_nano_12_p16_224", size=32, img_size=32, embed_dim=32, depth=3, num_heads=4),
    "CaiT (timm)": from_timm("cait_xxs24_224", size=32, img_size=32, patch_size=8, embed_dim=32, depth=3, num_heads=4),
    "PVT-v2 (timm)": from_timm(
        "pvt_v2_b0", size=64, embed_dims=(8, 16, 24, 32), depths=(1, 1, 2, 1), num_heads=(1, 2, 2, 4)
    ),
    "Twins (timm)": from_timm(
        "twins_svt_small", size=64, img_size=64, embed_dims=(8, 16, 24, 32), depths=(1, 1, 2, 1), num_heads=(1, 2, 2, 4)
    ),
    "Twins-PCPVT (timm)": from_timm(
        "twins_pcpvt_small",
        size=64,
        img_size=64,
        embed_dims=(8, 16, 24, 32),
        depths=(1, 1, 2, 1),
        num_heads=(1, 2, 2, 4),
    ),
    "RepVGG (timm)": from_timm("repvgg_a0", size=32, train=True),
    "GhostNet (timm)": from_timm("ghostnet_050", size=64, train=True),
    "MnasNet (timm)": from_timm("mnasnet_small", size=64, train=True),
    "TResNet (timm)": from_timm("tresnet_m", size=64),
    "EdgeNeXt (timm)": from_timm("edgenext_xx_small", size=64),
    "gMLP (timm)": from_timm("gmlp_ti16_224", size=64, img_size=64),
    "Visformer (timm)": from_timm("visformer_tiny", size=64, img_size=64, train=True),
    "SENet (timm)": from_timm("seresnet18", size=64, train=True),
    "Res2Net (timm)": from_timm("res2net50_14w_8s", size=64, train=True),
    "DLA (timm)": from_timm("dla34", size=64, train=True),
    "Xception (timm)": from_timm("xception41", size=96, train=True),
    "VoVNet (timm)": from_timm("ese_vovnet19b_slim", size=64, train=True),
    "SKNet (timm)": from_timm("skresnet18", size=64, train=True),
    "Hiera (timm)": from_timm(
        "hiera_tiny_224", size=64, img_size=(64, 64), embed_dim=16, num_heads=1, stages=(1, 1, 2, 1)
    ),
    "FastViT (timm)": from_timm("fastvit_t8", size=64, train=True),
    "MobileNetV4 (timm)": from_timm("mobilenetv4_conv_small_050", size=64, train=True),
    "DaViT (timm)": from_timm(
        "davit_tiny", size=64, embed_dims=(16, 16, 32, 32), depths=(1, 1, 2, 1), num_heads=(1, 1, 2, 2)
    ),
    "RepViT (timm)": from_timm("repvit_m0_9", size=64, train=True),
    "DenseNet (timm, training)": from_timm("densenet121", size=64, train=True),
    "EfficientNet (timm, training)": from_timm("efficientnet_b0", size=64, train=True),
}

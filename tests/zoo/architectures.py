"""The table of architectures: what transformers calls them, what is built from their configurations, and on what they train."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

Kind = Literal["causal", "masked", "encoder-decoder", "vision", "speech", "multimodal", "experts", "state-space"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """One row: `CONFIG_MAPPING[name](**config)`, trained by its own loss (or by the mean square of what it returns)."""

    kind: Kind
    head: str
    """Which `AutoModel...` builds it: "ForCausalLM"; "" is `AutoModel`."""
    config: dict[str, Any]
    inputs: str
    """The name of a function of inputs.py."""
    as_aot_eager: str = ""
    """Why the bits of eager and aot_eager differ; then aot_eager's are the ones to meet."""
    breaks: str = ""
    """Why Dynamo breaks the graph; then it may, but no parameter may be left to eager PyTorch for that."""


WORDS = 61
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TEXT = {
    "vocab_size": WORDS, "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 2, "num_attention_heads": 3,
    "max_position_embeddings": 64, **SPECIAL,
}  # fmt: skip
EVEN = {**TEXT, "hidden_size": 32, "num_attention_heads": 4}
GROUPED = {**TEXT, "num_key_value_heads": 1}
EXPERTS = {**GROUPED, "num_experts_per_tok": 2}
SEQ2SEQ = {
    "vocab_size": WORDS, "d_model": 24, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 3,
    "decoder_attention_heads": 3, "encoder_ffn_dim": 36, "decoder_ffn_dim": 36, "max_position_embeddings": 64,
    "decoder_start_token_id": 1, **SPECIAL,
}  # fmt: skip
T5 = {**SEQ2SEQ, "d_kv": 8, "d_ff": 36, "num_layers": 2, "num_heads": 3}
VIT = {
    "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 12,
    "patch_size": 4, "num_labels": 5,
}  # fmt: skip
SWIN = {
    "image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [1, 2], "window_size": 4, "num_labels": 5,
}  # fmt: skip
STAGES = {"num_encoder_blocks": 2, "depths": [1, 1], "hidden_sizes": [8, 16], "mlp_ratios": [2, 2], "num_labels": 5}
CONVS = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "layer_type": "basic", "num_labels": 5}
MOBILE = {"depth_multiplier": 0.125, "min_depth": 4, "num_labels": 5, "classifier_dropout_prob": 0.1, "initializer_range": 0.2}
WAVES = {
    "vocab_size": 13, "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 2, "num_attention_heads": 3,
    "conv_dim": (8, 8), "conv_kernel": (4, 3), "conv_stride": (3, 2), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "feat_extract_norm": "layer", "mask_time_prob": 0.0,
    "layerdrop": 0.0, "pad_token_id": 0, "ctc_loss_reduction": "mean", "num_labels": 5, "classifier_proj_size": 12,
}  # fmt: skip
MAMBA = {**TEXT, "state_size": 4, "expand": 2, "conv_kernel": 3}

_HOOKS = "at its first call, transformers installs the hooks that record its outputs, under a lock"
_SCAN = "where it is compiled, transformers scans by halves (associative_scan); eager, one position after the other"
_SOUND = "the feature extractor makes the sound require a gradient, which it does not in the graph"


def _row(kind: Kind, head: str, inputs: str, config: dict[str, Any], more: dict[str, Any]) -> Architecture:
    reasons = {name: more.pop(name) for name in ("as_aot_eager", "breaks") if name in more}
    return Architecture(kind=kind, head=head, inputs=inputs, config={**config, **more}, **reasons)


def _causal(config: dict[str, Any], **more: Any) -> Architecture:
    return _row("causal", "ForCausalLM", "words", config, more)


def _masked(config: dict[str, Any], **more: Any) -> Architecture:
    return _row("masked", "ForMaskedLM", "padded_words", config, more)


def _translates(config: dict[str, Any], **more: Any) -> Architecture:
    return _row("encoder-decoder", "ForSeq2SeqLM", "padded_words", config, more)


def _experts(config: dict[str, Any], **more: Any) -> Architecture:
    return _row("experts", "ForCausalLM", "words", config, more)


def _scans(config: dict[str, Any], **more: Any) -> Architecture:
    return _row("state-space", "ForCausalLM", "words", config, more)


def _sees(inputs: str, config: dict[str, Any], head: str = "ForImageClassification", **more: Any) -> Architecture:
    return _row("vision", head, inputs, config, more)


def _hears(inputs: str, head: str, config: dict[str, Any], **more: Any) -> Architecture:
    return _row("speech", head, inputs, config, more)


def _reads_pictures(inputs: str, head: str, **config: Any) -> Architecture:
    return _row("multimodal", head, inputs, {}, config)


ARCHITECTURES: dict[str, Architecture] = {
    "gpt2": _causal(TEXT),
    "gpt_neo": _causal(TEXT, attention_types=[[["global", "local"], 1]], window_size=5),
    "gpt_neox": _causal(TEXT),
    "gptj": _causal(TEXT, rotary_dim=4),
    "gpt_bigcode": _causal(TEXT),
    "opt": _causal(TEXT, ffn_dim=36, word_embed_proj_dim=24),
    "bloom": _causal(TEXT),
    "mpt": _causal(EVEN, max_seq_len=64, expansion_ratio=2),
    "falcon": _causal(TEXT),
    "codegen": _causal(EVEN, rotary_dim=4),
    "xglm": _causal(TEXT, ffn_dim=36),
    "biogpt": _causal(TEXT),
    "ctrl": _causal(
        TEXT, dff=36, breaks="it assigns to a buffer, and Dynamo can't ask that one if it is saved"),
    "llama": _causal(GROUPED),
    "mistral": _causal(GROUPED, sliding_window=5, head_dim=8),
    "qwen2": _causal(GROUPED, tie_word_embeddings=True),
    "qwen3": _causal(GROUPED, head_dim=8),
    "gemma": _causal(GROUPED, head_dim=8),
    "gemma2": _causal(GROUPED, head_dim=8, sliding_window=5),
    "gemma3_text": _causal(GROUPED, head_dim=8, sliding_window=5),
    "phi": _causal(TEXT),
    "phi3": _causal(GROUPED),
    "olmo2": _causal(GROUPED),
    "stablelm": _causal(GROUPED),
    "starcoder2": _causal(GROUPED),
    "cohere": _causal(GROUPED),
    "glm4": _causal(GROUPED, head_dim=8),
    "nemotron": _causal(GROUPED),
    "bert": _masked(TEXT),
    "roberta": _masked(TEXT, pad_token_id=1),
    "distilbert": _masked(TEXT, hidden_dim=36),
    "albert": _masked(TEXT, embedding_size=12),
    "electra": _masked(TEXT, embedding_size=12),
    "deberta-v2": _masked(TEXT, relative_attention=True, pos_att_type=["p2c", "c2p"]),
    "mpnet": _masked(TEXT),
    "modernbert": _masked(TEXT, local_attention=4, cls_token_id=1, sep_token_id=2),
    "convbert": _masked(EVEN, embedding_size=16, conv_kernel_size=3),
    "fnet": _masked(TEXT),
    "roformer": _masked(TEXT),
    "megatron-bert": _masked(TEXT),
    "squeezebert": _masked(TEXT, embedding_size=24, q_groups=1, k_groups=1, v_groups=1),
    "mobilebert": _masked(EVEN, embedding_size=16, intra_bottleneck_size=16, num_feedforward_networks=2),
    "nystromformer": _masked(TEXT, num_landmarks=13, segment_means_seq_len=13),
    "longformer": _masked(
        TEXT, attention_window=4, breaks="it logs that it pads its input, and reads whether any attention is global"),
    "big_bird": _masked(TEXT, attention_type="original_full", sep_token_id=3),
    "rembert": _masked(TEXT, input_embedding_size=12, output_embedding_size=12),
    "xlm-roberta": _masked(TEXT, pad_token_id=1),
    "esm": _masked(TEXT, position_embedding_type="rotary", mask_token_id=3, emb_layer_norm_before=True),
    "t5": _translates(T5),
    "umt5": _translates(T5),
    "bart": _translates(SEQ2SEQ),
    "mbart": _translates(SEQ2SEQ),
    "pegasus": _translates(SEQ2SEQ),
    "marian": _translates(SEQ2SEQ),
    "blenderbot": _translates(SEQ2SEQ),
    "m2m_100": _translates(SEQ2SEQ, encoder_layerdrop=0.0, decoder_layerdrop=0.0),
    "led": _translates(
        SEQ2SEQ, attention_window=4, max_encoder_position_embeddings=64, max_decoder_position_embeddings=64,
        breaks="it logs that it pads its input, and reads whether any attention is global"),
    "prophetnet": _translates(
        {**SPECIAL, "vocab_size": WORDS, "hidden_size": 24, "max_position_embeddings": 64, "decoder_start_token_id": 1},
        encoder_ffn_dim=36, decoder_ffn_dim=36, num_encoder_layers=1, num_decoder_layers=1, num_encoder_attention_heads=3,
        num_decoder_attention_heads=3),
    "vit": _sees("pictures", VIT),
    "deit": _sees("pictures", VIT, architectures=["DeiTForImageClassification"]),
    "beit": _sees("pictures", VIT),
    "dinov2": _sees("pictures", VIT),
    "ijepa": _sees("pictures", VIT),
    "yolos": _sees("pictures", VIT, head="", image_size=[12, 12], num_detection_tokens=3),
    "vit_mae": _sees(
        "pictures", VIT, head="ForPreTraining", decoder_hidden_size=24, decoder_num_hidden_layers=1,
        decoder_num_attention_heads=3, decoder_intermediate_size=36),
    "swin": _sees("larger_pictures", SWIN),
    "swinv2": _sees("larger_pictures", SWIN),
    "segformer": _sees(
        "larger_pictures", STAGES, sr_ratios=[2, 1], patch_sizes=[3, 3], strides=[2, 2], num_attention_heads=[1, 2]),
    "pvt": _sees(
        "larger_pictures", STAGES, sequence_reduction_ratios=[2, 1], patch_sizes=[4, 2], strides=[4, 2],
        num_attention_heads=[1, 2], image_size=16),
    "poolformer": _sees("larger_pictures", STAGES, patch_sizes=[3, 3], strides=[2, 2], padding=[1, 1]),
    "mobilevit": _sees(
        "largest_pictures", {"image_size": 64, "hidden_sizes": [12, 16, 20], "num_attention_heads": 2, "num_labels": 5},
        neck_hidden_sizes=[4, 8, 8, 12, 12, 16, 24]),
    "levit": _sees(
        "largest_pictures", {"image_size": 64, "hidden_sizes": [16, 24, 32], "depths": [1, 1, 1], "num_labels": 5},
        num_attention_heads=[1, 2, 2], key_dim=[8, 8, 8], architectures=["LevitForImageClassification"]),
    "resnet": _sees("larger_pictures", CONVS),
    "convnext": _sees("larger_pictures", CONVS, num_stages=2, patch_size=2),
    "convnextv2": _sees("larger_pictures", CONVS, num_stages=2, patch_size=2),
    "regnet": _sees("larger_pictures", CONVS, groups_width=4, layer_type="y"),
    "bit": _sees("larger_pictures", CONVS, num_groups=4, layer_type="preactivation"),
    "mobilenet_v1": _sees("largest_pictures", MOBILE),
    "mobilenet_v2": _sees("largest_pictures", MOBILE),
    "efficientnet": _sees(
        "largest_pictures", {"width_coefficient": 0.25, "depth_coefficient": 0.3, "hidden_dim": 320, "num_labels": 5},
        initializer_range=0.2, as_aot_eager="AOTAutograd rounds dropout's 1 / (1 - p) once less: another float for p = 0.15"),
    "videomae": _sees("clips", VIT, head="ForVideoClassification", num_frames=4),
    "timesformer": _sees("clips", VIT, head="ForVideoClassification", num_frames=4),
    "wav2vec2": _hears("waves", "ForCTC", WAVES, breaks=_SOUND),
    "hubert": _hears("waves", "ForCTC", WAVES, breaks=_SOUND),
    "wavlm": _hears("unlabelled_waves", "", WAVES, max_bucket_distance=16, num_buckets=8, breaks=_SOUND),
    "sew": _hears("unlabelled_waves", "", WAVES, squeeze_factor=2, breaks=_SOUND),
    "unispeech": _hears("unlabelled_waves", "", WAVES, breaks=_SOUND),
    "audio-spectrogram-transformer": _hears(
        "spectrograms", "ForAudioClassification", VIT, num_mel_bins=8, max_length=12, time_stride=2, frequency_stride=2),
    "whisper": _hears(
        "spoken_words", "ForSpeechSeq2Seq", SEQ2SEQ, num_mel_bins=8, max_source_positions=10, max_target_positions=20),
    "speech_to_text": _hears(
        "listened_words", "ForSpeechSeq2Seq", SEQ2SEQ, input_feat_per_channel=8, conv_channels=12, max_source_positions=40,
        max_target_positions=20, num_conv_layers=2, conv_kernel_sizes=[3, 3]),
    "moonshine": _hears(
        "long_waves", "ForSpeechSeq2Seq", GROUPED, encoder_num_hidden_layers=1, decoder_num_hidden_layers=1,
        encoder_num_attention_heads=3, decoder_num_attention_heads=3, decoder_start_token_id=1),
    "clip": _reads_pictures("captioned_pictures", "", text_config=TEXT, vision_config=VIT, projection_dim=12),
    "siglip": _reads_pictures("captioned_pictures", "", text_config=TEXT, vision_config=VIT),
    "chinese_clip": _reads_pictures("captioned_pictures", "", text_config=TEXT, vision_config=VIT, projection_dim=12),
    "blip": _reads_pictures(
        "captioned_pictures", "", text_config={**TEXT, "encoder_hidden_size": 24, "sep_token_id": 3}, vision_config=VIT,
        projection_dim=12),
    "git": _reads_pictures("prompted_pictures", "ForCausalLM", **TEXT, vision_config=VIT),
    "llava": _reads_pictures(
        "pictures_in_words", "ForImageTextToText", text_config={**GROUPED, "model_type": "llama"},
        vision_config={**VIT, "model_type": "clip_vision_model"}, image_token_index=7, image_seq_length=9, breaks=_HOOKS,
        as_aot_eager="for its last vision layer, whose output is not used, AOTAutograd returns zero gradients, eager none"),
    "paligemma": _reads_pictures(
        "pictures_in_words", "ForImageTextToText", text_config={**GROUPED, "model_type": "gemma", "head_dim": 8},
        vision_config={**VIT, "model_type": "siglip_vision_model"}, image_token_index=7, projection_dim=24, hidden_size=24),
    "mixtral": _experts(EXPERTS, num_local_experts=3, output_router_logits=True, breaks=_HOOKS),
    "qwen2_moe": _experts(EXPERTS, num_experts=3, moe_intermediate_size=20, shared_expert_intermediate_size=20),
    "qwen3_moe": _experts(EXPERTS, num_experts=3, moe_intermediate_size=20, head_dim=8),
    "olmoe": _experts(EXPERTS, num_experts=3, output_router_logits=True, breaks=_HOOKS),
    "granitemoe": _experts(EXPERTS, num_local_experts=3),
    "gpt_oss": _experts(EXPERTS, num_local_experts=3, head_dim=8, sliding_window=5),
    "phimoe": _experts(EXPERTS, num_local_experts=3),
    "deepseek_v3": _experts(
        EXPERTS, n_routed_experts=4, n_group=2, topk_group=1, first_k_dense_replace=1, moe_intermediate_size=20,
        n_shared_experts=1, kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8),
    "mamba": _scans(MAMBA, time_step_rank=3, as_aot_eager=_SCAN),
    "mamba2": _scans(MAMBA, num_heads=6, head_dim=8, n_groups=1, chunk_size=4),
    "falcon_mamba": _scans(MAMBA, time_step_rank=3, as_aot_eager=_SCAN),
    "jamba": _scans(
        GROUPED, mamba_d_state=4, mamba_dt_rank=3, num_experts=2, num_experts_per_tok=1, attn_layer_period=2,
        attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1, as_aot_eager=_SCAN),
    "bamba": _scans(
        GROUPED, mamba_n_heads=6, mamba_d_head=8, mamba_d_state=4, mamba_n_groups=1, mamba_chunk_size=4, mamba_expand=2,
        attn_layer_indices=[1]),
    "recurrent_gemma": _scans(
        GROUPED, lru_width=24, attention_window_size=5, block_types=["recurrent", "attention"], head_dim=8),
    "rwkv": _scans(TEXT, attention_hidden_size=24, context_length=16),
    "lfm2": _scans(GROUPED, layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False),
}  # fmt: skip

AMPLIFYING = {"levit", "mobilenet_v1", "mobilenet_v2", "efficientnet"}
"""Many batch normalisations over a handful of values each: what a linear layer's backward rounds otherwise, they raise by more
than the comparison allows for (seen: 1.01 to 4.4 times that). In tiles and chunks they train in double precision."""

SKIPPED: dict[str, str] = {
    "switch_transformers": "loops over the experts in use; Dynamo leaves the frame around that, and so the head, to eager",
    "vilt": "resizes its position embeddings to the mask of each picture in a list comprehension, which Dynamo leaves to eager",
}
"""Architectures that were tried and don't train without a fallback, and why."""

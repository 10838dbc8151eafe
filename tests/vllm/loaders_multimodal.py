# ruff: noqa: E501
"""Text with images, video or sound."""

from common_sizes import ENCODER, EXPERTS, ONE_GROUP, QWEN_VISION, ROUTED, SHARED, SMALL
from more_loaders import case, plain_config
from vllm_loaders import _CASES, _Q35, _ROPE3, _VIT, _VQ3, IDS, _experts_in_out, _nested_tower, txt

EXP = dict(**EXPERTS, norm_topk_prob=True)
VLM = "AutoModelForImageTextToText"
_T3 = txt(head_dim=8, rope_parameters=dict(_ROPE3, mrope_section=[2, 1, 1]))
_SIG = dict(**_VIT, model_type="siglip_vision_model")
_CLIP = dict(**_VIT, model_type="clip_vision_model", projection_dim=64)

case(
    "qwen2_5_vl",
    "qwen2_5_vl",
    "Qwen2_5_VLForConditionalGeneration",
    dict(
        text_config=_CASES["qwen2_vl"].kw["text_config"],
        vision_config=dict(**QWEN_VISION, window_size=56, fullatt_block_indexes=[1]),
        **IDS,
    ),
    auto=VLM,
)
case(
    "qwen3_vl",
    "qwen3_vl",
    "Qwen3VLForConditionalGeneration",
    dict(text_config=_T3, vision_config=dict(**_VQ3, deepstack_visual_indexes=[0]), **IDS),
    auto=VLM,
)
case(
    "qwen3_vl_moe",
    "qwen3_vl_moe",
    "Qwen3VLMoeForConditionalGeneration",
    dict(
        text_config={**_T3, **EXP}, vision_config=dict(**_VQ3, deepstack_visual_indexes=[0]), **IDS
    ),
    auto=VLM,
    metas=_experts_in_out,
)
case(
    "qwen3_vl_moe_ep",
    "qwen3_vl_moe",
    "Qwen3VLMoeForConditionalGeneration",
    dict(
        text_config={**_T3, **EXP}, vision_config=dict(**_VQ3, deepstack_visual_indexes=[0]), **IDS
    ),
    auto=VLM,
    ep=True,
    metas=_experts_in_out,
)
case(
    "qwen3_5",
    "qwen3_5",
    "Qwen3_5ForConditionalGeneration",
    dict(text_config=_Q35, vision_config=_VQ3, **IDS),
    auto=VLM,
)
case(
    "qwen3_5_moe",
    "qwen3_5_moe",
    "Qwen3_5MoeForConditionalGeneration",
    dict(
        text_config={**_Q35, **EXP, "shared_expert_intermediate_size": 64},
        vision_config=_VQ3,
        **IDS,
    ),
    auto=VLM,
)
_AUDIO = dict(
    d_model=64,
    encoder_layers=2,
    encoder_attention_heads=4,
    encoder_ffn_dim=128,
    num_mel_bins=16,
    max_source_positions=32,
)
case(
    "qwen2_audio",
    "qwen2_audio",
    "Qwen2AudioForConditionalGeneration",
    dict(
        text_config={**txt(), "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
        audio_config={**_AUDIO, "model_type": "qwen2_audio_encoder"},
        audio_token_index=300,
    ),
    auto="Qwen2AudioForConditionalGeneration",
    unfuse=lambda k: k,
)
case(
    "llava",
    "llava",
    "LlavaForConditionalGeneration",
    dict(text_config={**txt(), "model_type": "llama"}, vision_config=_CLIP, image_token_index=300),
    auto=VLM,
    unfuse=lambda k: k,
)
case(
    "llava_nested",
    "llava",
    "LlavaForConditionalGeneration",
    dict(text_config={**txt(), "model_type": "llama"}, vision_config=_CLIP, image_token_index=300),
    auto=VLM,
    metas=_nested_tower,
)
case(
    "llava_siglip",
    "llava",
    "LlavaForConditionalGeneration",
    dict(
        text_config={**txt(), "model_type": "llama"},
        vision_config=_SIG,
        image_token_index=300,
        vision_feature_select_strategy="full",
    ),
    auto=VLM,
    unfuse=lambda k: k,
)
case(
    "llava_next",
    "llava_next",
    "LlavaNextForConditionalGeneration",
    dict(
        text_config={**txt(), "model_type": "mistral"},
        vision_config=_CLIP,
        image_token_index=300,
        image_grid_pinpoints=[[56, 56]],
    ),
    auto=VLM,
    unfuse=lambda k: k,
)
case(
    "llava_next_video",
    "llava_next_video",
    "LlavaNextVideoForConditionalGeneration",
    dict(
        text_config={**txt(), "model_type": "llama"},
        vision_config=_CLIP,
        image_token_index=300,
        video_token_index=301,
        image_grid_pinpoints=[[56, 56]],
    ),
    auto="AutoModelForImageTextToText",
    unfuse=lambda k: k,
)
case(
    "llava_onevision",
    "llava_onevision",
    "LlavaOnevisionForConditionalGeneration",
    dict(
        text_config={**txt(), "model_type": "qwen2"},
        vision_config={**_SIG, "vision_use_head": False},
        image_token_index=300,
        video_token_index=301,
        image_grid_pinpoints=[[56, 56]],
    ),
    auto=VLM,
    unfuse=lambda k: k,
)
case(
    "pixtral_hf",
    "llava",
    "LlavaForConditionalGeneration",
    dict(
        text_config={**txt(head_dim=8), "model_type": "mistral"},
        vision_config=dict(**_VIT, model_type="pixtral", head_dim=16),
        image_token_index=300,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    ),
    auto=VLM,
)
case(
    "mistral3",
    "mistral3",
    "Mistral3ForConditionalGeneration",
    dict(
        text_config={**txt(head_dim=8), "model_type": "mistral"},
        vision_config=dict(**_VIT, model_type="pixtral", head_dim=16),
        image_token_index=300,
        spatial_merge_size=2,
    ),
    auto=VLM,
)
case(
    "paligemma",
    "paligemma",
    "PaliGemmaForConditionalGeneration",
    dict(
        text_config={**txt(head_dim=8, tie_word_embeddings=True), "model_type": "gemma"},
        vision_config={**_SIG, "projection_dim": 64},
        projection_dim=64,
        image_token_index=300,
    ),
    auto=VLM,
    unfuse=lambda k: k,
)
case(
    "gemma3_mm",
    "gemma3",
    "Gemma3ForConditionalGeneration",
    dict(
        text_config=txt(head_dim=8, tie_word_embeddings=True),
        vision_config={**_SIG, "vision_use_head": False},
        mm_tokens_per_image=4,
        image_token_index=300,
    ),
    auto=VLM,
    unfuse=lambda k: k,
)
case(
    "gemma4_mm",
    "gemma4",
    "Gemma4ForConditionalGeneration",
    dict(
        text_config=_CASES.get("gemma4", _CASES["gemma3_text"]).kw,
        vision_config=dict(**ENCODER, num_key_value_heads=4, head_dim=16),
        audio_config=None,
    ),
    auto=VLM,
)
case(
    "idefics3",
    "idefics3",
    "Idefics3ForConditionalGeneration",
    dict(
        text_config={**txt(), "model_type": "llama"},
        vision_config=_VIT,
        scale_factor=2,
        image_token_id=300,
        tie_word_embeddings=False,
    ),
    auto=VLM,
)
case(
    "smolvlm",
    "smolvlm",
    "SmolVLMForConditionalGeneration",
    dict(
        text_config={**txt(), "model_type": "llama"},
        vision_config=_VIT,
        scale_factor=2,
        image_token_id=300,
        tie_word_embeddings=False,
    ),
    auto=VLM,
)
case(
    "internvl_hf",
    "internvl",
    "InternVLForConditionalGeneration",
    dict(
        text_config={**txt(), "model_type": "qwen2"},
        vision_config=dict(**ENCODER, image_size=[56, 56], patch_size=[14, 14]),
        image_token_id=300,
        downsample_ratio=0.5,
    ),
    auto=VLM,
)
case(
    "glm4v",
    "glm4v",
    "Glm4vForConditionalGeneration",
    dict(
        text_config=txt(
            head_dim=8,
            rope_parameters=dict(
                rope_type="default",
                rope_theta=1e4,
                mrope_section=[1, 1, 2],
                partial_rotary_factor=1.0,
            ),
        ),
        vision_config=dict(**QWEN_VISION, image_size=56),
        **IDS,
    ),
    auto=VLM,
)
case(
    "glm4v_moe",
    "glm4v_moe",
    "Glm4vMoeForConditionalGeneration",
    dict(
        text_config=txt(
            **ROUTED,
            **SHARED,
            **ONE_GROUP,
            use_qk_norm=True,
            head_dim=8,
            rope_parameters=dict(
                rope_type="default",
                rope_theta=1e4,
                mrope_section=[1, 1, 2],
                partial_rotary_factor=1.0,
            ),
        ),
        vision_config=dict(**QWEN_VISION, image_size=56),
        **IDS,
    ),
    auto=VLM,
)
case(
    "glm_ocr",
    "glm_ocr",
    "GlmOcrForConditionalGeneration",
    dict(
        text_config=txt(
            head_dim=8,
            num_nextn_predict_layers=1,
            rope_parameters=dict(
                rope_type="default",
                rope_theta=1e4,
                mrope_section=[1, 1, 2],
                partial_rotary_factor=1.0,
            ),
        ),
        vision_config=dict(**QWEN_VISION, image_size=56),
        **IDS,
    ),
    auto=VLM,
)
case(
    "aria",
    "aria",
    "AriaForConditionalGeneration",
    dict(
        text_config=txt(moe_num_experts=4, moe_topk=2, moe_num_shared_experts=1, head_dim=8),
        vision_config={**_VIT, "model_type": "idefics3_vision"},
        projector_patch_to_query_dict={16: 8},
        image_token_index=300,
    ),
    auto=VLM,
)
case(
    "blip2",
    "blip-2",
    "Blip2ForConditionalGeneration",
    dict(
        text_config=dict(
            **SMALL,
            model_type="opt",
            ffn_dim=128,
            max_position_embeddings=128,
            word_embed_proj_dim=64,
        ),
        vision_config=dict(**_VIT),
        qformer_config=dict(**ENCODER, encoder_hidden_size=64, vocab_size=320),
        num_query_tokens=8,
        image_token_index=300,
    ),
    auto="Blip2ForConditionalGeneration",
)
case(
    "cohere2_vision",
    "cohere2_vision",
    "Cohere2VisionForConditionalGeneration",
    dict(
        text_config={
            **txt(
                tie_word_embeddings=True,
                layer_types=["sliding_attention", "full_attention"],
                sliding_window=32,
            ),
            "model_type": "cohere2",
        },
        vision_config=_SIG,
        downsample_factor=2,
        alignment_intermediate_size=128,
        image_token_id=300,
    ),
    auto=VLM,
    unfuse=lambda k: k,
)
case(
    "audioflamingo3",
    "audioflamingo3",
    "AudioFlamingo3ForConditionalGeneration",
    dict(
        text_config={**txt(), "model_type": "qwen2"},
        audio_config={
            **dict(**ENCODER, num_mel_bins=16, max_source_positions=32),
            "model_type": "audioflamingo3_encoder",
        },
        audio_token_id=300,
    ),
    auto="AudioFlamingo3ForConditionalGeneration",
    unfuse=lambda k: k,
)
case(
    "granite_speech",
    "granite_speech",
    "GraniteSpeechForConditionalGeneration",
    dict(
        text_config={**txt(), "model_type": "granite"},
        encoder_config=dict(
            input_dim=16,
            num_layers=2,
            hidden_dim=64,
            num_heads=4,
            dim_head=16,
            output_dim=16,
            context_size=16,
            max_pos_emb=32,
        ),
        projector_config=dict(**ENCODER, model_type="blip_2_qformer", encoder_hidden_size=64),
        audio_token_index=300,
        has_lora_adapter=False,
    ),
    auto="GraniteSpeechForConditionalGeneration",
)
case(
    "lighton_ocr",
    "lighton_ocr",
    "LightOnOCRForConditionalGeneration",
    dict(
        text_config={**txt(head_dim=8), "model_type": "qwen3"},
        vision_config=dict(**_VIT, model_type="pixtral", head_dim=16),
        image_token_id=300,
        spatial_merge_size=2,
        vision_feature_layer=-1,
        projector_hidden_act="gelu",
        multimodal_projector_bias=False,
    ),
    auto=VLM,
)
case(
    "exaone4_5",
    "exaone4_5",
    "Exaone4_5_ForConditionalGeneration",
    dict(
        text_config={
            **txt(sliding_window=32, layer_types=["sliding_attention", "full_attention"]),
            "model_type": "exaone4",
        },
        vision_config=dict(
            **QWEN_VISION, num_key_value_heads=4, window_size=56, fullatt_block_indexes=[1]
        ),
    ),
    auto=VLM,
)
case(
    "paddleocr_vl",
    "paddleocr_vl",
    "PaddleOCRVLForConditionalGeneration",
    dict(text_config=txt(head_dim=8), vision_config=_VIT),
    auto=VLM,
)
case(
    "glmasr",
    "glmasr",
    "GlmAsrForConditionalGeneration",
    dict(
        text_config={**txt(), "model_type": "llama"},
        audio_config=dict(**ENCODER, num_mel_bins=16, max_position_embeddings=32),
        audio_token_id=300,
    ),
    auto="GlmAsrForConditionalGeneration",
    unfuse=lambda k: k,
)


def _molmo(metas, config):
    """Two pieces of the embedding; joined, the columns of the projector's gate come after the rest."""
    out = {}
    names = {
        "model.layers.": "model.transformer.blocks.",
        "model.norm.": "model.transformer.ln_f.",
        "lm_head.": "model.transformer.ff_out.",
        "self_attn.qkv_proj": "att_proj",
        "self_attn.o_proj": "attn_out",
        "mlp.down_proj": "ff_out",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ff_norm",
        "image_projector.gate_proj": "image_projector.w1",
        "image_projector.up_proj": "image_projector.w3",
        "image_projector.down_proj": "image_projector.w2",
    }
    for key, (shape, dtype) in metas.items():
        if key == "model.embed_tokens.weight":
            out["model.transformer.wte.embedding"] = ((shape[0] - 64, shape[1]), dtype)
            out["model.transformer.wte.new_embedding"] = ((64, shape[1]), dtype)
            continue
        if "vision_backbone" in key and not key.startswith("model."):
            key = "model." + key
        for ours, theirs in names.items():
            if "image_vit" not in key:
                key = key.replace(ours, theirs)
        out[key] = (shape, dtype)
    return out


def _molmo_names(key):
    return (
        key.replace(".q_proj", ".qkv_proj") if "model.layers" in key and ".q_proj" in key else key
    )


case(
    "molmo",
    "molmo",
    "MolmoForCausalLM",
    txt(
        embedding_size=320,
        layer_norm_eps=1e-5,
        layer_norm_type="rms",
        weight_tying=False,
        qkv_bias=True,
        norm_after=False,
        attention_layer_norm=False,
        rope_theta=1e4,
        rope_parameters=dict(rope_type="default", rope_theta=1e4),
        **{"intermediate_size": 256},
    ),
    make_config=plain_config("molmo"),
    unfuse=_molmo_names,
    metas=_molmo,
)

# ruff: noqa: E501
"""Encoders, poolers, classifiers and rankers."""

from common_sizes import ENCODER, HUB, MAMBA, SMALL
from more_loaders import case, plain_config
from vllm_loaders import _CASES, _VIT, txt

POOL = dict(runner="pooling")
BERT = _CASES["bert"].kw
MODERN = _CASES["modernbert"].kw

case(
    "bert_mlm_tied", "bert", "BertForMaskedLM", BERT, auto="BertForMaskedLM", model_kw=POOL, tp=(1,)
)
case(
    "bert_mlm",
    "bert",
    "BertForMaskedLM",
    {**BERT, "tie_word_embeddings": False},
    auto="BertForMaskedLM",
    model_kw=POOL,
    metas=lambda m, c: {
        **m,
        "cls.predictions.decoder.weight": ((320, 64), m["cls.predictions.bias"][1]),
    },
)
case(
    "bert_splade",
    "bert",
    "BertSpladeSparseEmbeddingModel",
    BERT,
    auto="BertForMaskedLM",
    model_kw=POOL,
)
case(
    "bert_classify",
    "bert",
    "BertForSequenceClassification",
    {**BERT, "num_labels": 3},
    auto="BertForSequenceClassification",
    model_kw=POOL,
)
case(
    "bert_tokens",
    "bert",
    "BertForTokenClassification",
    {**BERT, "num_labels": 3},
    auto="BertForTokenClassification",
    model_kw=POOL,
)
_ROB = {
    **BERT,
    "position_embedding_type": "absolute",
    "pad_token_id": 1,
    "type_vocab_size": 1,
    "max_position_embeddings": 130,
}
case("roberta", "roberta", "RobertaModel", _ROB, auto="AutoModel", model_kw=POOL)
case("roberta_mlm", "roberta", "RobertaForMaskedLM", _ROB, auto="RobertaForMaskedLM", model_kw=POOL)
case(
    "roberta_classify",
    "roberta",
    "RobertaForSequenceClassification",
    {**_ROB, "num_labels": 3},
    auto="RobertaForSequenceClassification",
    model_kw=POOL,
)
case(
    "roberta_tokens",
    "roberta",
    "RobertaForTokenClassification",
    {**_ROB, "num_labels": 3},
    auto="RobertaForTokenClassification",
    model_kw=POOL,
)
case("bge_m3", "xlm-roberta", "BgeM3EmbeddingModel", _ROB, auto="AutoModel", model_kw=POOL)
case(
    "modernbert_classify",
    "modernbert",
    "ModernBertForSequenceClassification",
    {**MODERN, "num_labels": 3},
    auto="ModernBertForSequenceClassification",
    model_kw=POOL,
)
case(
    "modernbert_tokens",
    "modernbert",
    "ModernBertForTokenClassification",
    {**MODERN, "num_labels": 3},
    auto="ModernBertForTokenClassification",
    model_kw=POOL,
)


def _fused_qkv(metas, config):
    out = {}
    for key, (shape, dtype) in metas.items():
        if ".q_proj." in key:
            out[key.replace("q_proj", "qkv_proj")] = ((3 * shape[0], *shape[1:]), dtype)
        elif ".k_proj." not in key and ".v_proj." not in key:
            out[key] = (shape, dtype)
    return out


_NOMIC = dict(
    **SMALL,
    n_embd=64,
    n_inner=128,
    n_layer=2,
    n_head=8,
    intermediate_size=128,
    type_vocab_size=2,
    layer_norm_epsilon=1e-5,
    layer_norm_eps=1e-5,
    activation_function="swiglu",
    hidden_act="silu",
    rotary_emb_base=1e4,
    rotary_emb_fraction=1.0,
    rotary_kwargs={},
    rotary_emb_scale_base=None,
    rotary_emb_interleaved=False,
    rotary_scaling_factor=None,
    max_trained_positions=128,
    n_positions=128,
    max_position_embeddings=128,
    qkv_proj_bias=False,
    mlp_fc1_bias=False,
    mlp_fc2_bias=False,
    position_embedding_type="rotary",
    pad_token_id=0,
    prenorm=False,
    causal=False,
    bias=False,
)
case(
    "nomic_bert",
    "nomic_bert_hub",
    "NomicBertModel",
    _NOMIC,
    auto="AutoModel",
    model_kw=POOL,
    unfuse=lambda k: k,
    make_config=plain_config("nomic_bert_hub", "NomicBertConfig"),
    metas=_fused_qkv,
)
case(
    "nomic_moe",
    "nomic_bert_hub",
    "NomicBertModel",
    {
        **_NOMIC,
        "num_experts": 4,
        "moe_top_k": 2,
        "moe_every_n_layers": 2,
        "activation_function": "gelu",
    },
    auto="AutoModel",
    model_kw=POOL,
    unfuse=lambda k: k,
    make_config=plain_config("nomic_bert_hub", "NomicBertConfig"),
    metas=_fused_qkv,
)
case(
    "clip",
    "clip",
    "CLIPModel",
    dict(
        text_config=dict(**ENCODER, vocab_size=320, max_position_embeddings=32, eos_token_id=2),
        vision_config=_VIT,
        projection_dim=64,
    ),
    auto="AutoModel",
    model_kw=POOL,
)
case(
    "siglip",
    "siglip",
    "SiglipModel",
    dict(
        text_config=dict(**ENCODER, vocab_size=320, max_position_embeddings=32, projection_size=64),
        vision_config=_VIT,
    ),
    auto="AutoModel",
    model_kw=POOL,
)

# ---- decoders as embedders and classifiers
EMBED = dict(runner="pooling", convert="embed")
CLASSIFY = dict(runner="pooling", convert="classify")
case("llama_embed", "llama", "LlamaForCausalLM", txt(), model_kw=EMBED)
case("llama_model_embed", "llama", "LlamaModel", txt(), auto="AutoModel", model_kw=EMBED)
case("qwen2_embed", "qwen2", "Qwen2ForCausalLM", txt(), model_kw=EMBED)
case("qwen2_model_embed", "qwen2", "Qwen2Model", txt(), auto="AutoModel", model_kw=EMBED)
case(
    "gemma2_embed",
    "gemma2",
    "Gemma2Model",
    txt(head_dim=8, tie_word_embeddings=True),
    auto="AutoModel",
    model_kw=EMBED,
)
case(
    "gemma3_embed",
    "gemma3_text",
    "Gemma3TextModel",
    txt(head_dim=8, tie_word_embeddings=True),
    auto="AutoModel",
    model_kw=EMBED,
)
case(
    "qwen3_classify",
    "qwen3",
    "Qwen3ForSequenceClassification",
    txt(head_dim=8, num_labels=3),
    auto="AutoModelForSequenceClassification",
    model_kw=CLASSIFY,
)
case(
    "llama_classify",
    "llama",
    "LlamaForSequenceClassification",
    txt(num_labels=3),
    auto="AutoModelForSequenceClassification",
    model_kw=CLASSIFY,
)
case(
    "llama_classify_bias",
    "llama",
    "LlamaForSequenceClassification",
    txt(num_labels=3),
    auto="AutoModelForSequenceClassification",
    model_kw=CLASSIFY,
    metas=lambda m, c: {**m, "score.bias": ((3,), m["score.weight"][1])},
)
case(
    "qwen2_reward",
    "qwen2",
    "Qwen2ForRewardModel",
    txt(num_labels=1),
    model_kw=POOL,
    unfuse=lambda k: k,
)
case(
    "qwen2_process_reward",
    "qwen2",
    "Qwen2ForProcessRewardModel",
    txt(num_labels=2),
    model_kw=POOL,
    unfuse=lambda k: k,
)
case(
    "internlm2_reward",
    "internlm2",
    "InternLM2ForRewardModel",
    txt(**HUB, bias=False),
    model_kw=POOL,
    unfuse=lambda k: k,
    make_config=plain_config("internlm2"),
)
case(
    "gpt2_classify",
    "gpt2",
    "GPT2ForSequenceClassification",
    {**_CASES["gpt2"].kw, "num_labels": 3, "pad_token_id": 0},
    auto="GPT2ForSequenceClassification",
    model_kw=POOL,
)
case(
    "jamba_classify",
    "jamba",
    "JambaForSequenceClassification",
    txt(
        **MAMBA,
        num_experts=4,
        num_experts_per_tok=2,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        mamba_dt_rank=8,
        num_hidden_layers=4,
        use_mamba_kernels=False,
        num_labels=3,
    ),
    auto="JambaForSequenceClassification",
    model_kw=POOL,
)
case(
    "llama_bidirectional",
    "llama_bidirec",
    "LlamaBidirectionalModel",
    txt(**HUB, pooling="avg"),
    model_kw=POOL,
    unfuse=lambda k: k,
    make_config=plain_config("llama_bidirec"),
)
case(
    "voyage",
    "qwen3",
    "VoyageQwen3BidirectionalEmbedModel",
    txt(head_dim=8, num_labels=32),
    auto="AutoModel",
    model_kw=POOL,
    unfuse=lambda k: k,
)
case(
    "qwen2_vl_embed",
    "qwen2_vl",
    "Qwen2VLForConditionalGeneration",
    _CASES["qwen2_vl"].kw,
    auto="Qwen2VLForConditionalGeneration",
    model_kw=EMBED,
)
case(
    "bert_transformers_embed",
    "bert",
    "TransformersEmbeddingModel",
    BERT,
    auto="AutoModel",
    model_kw=POOL,
)
case(
    "llama_transformers_embed",
    "llama",
    "TransformersEmbeddingModel",
    txt(),
    auto="AutoModel",
    model_kw=POOL,
)
case(
    "colmodernbert",
    "modernbert",
    "ColBERTModernBertModel",
    {**MODERN, "dim": 32},
    auto="AutoModel",
    model_kw=POOL,
    metas=lambda m, c: {**m, "linear.weight": ((32, 64), next(iter(m.values()))[1])},
)
case(
    "colpali",
    "colpali",
    "ColPaliForRetrieval",
    dict(
        vlm_config=dict(
            model_type="paligemma",
            text_config={**txt(head_dim=8, tie_word_embeddings=True), "model_type": "gemma"},
            vision_config=dict(**_VIT, model_type="siglip_vision_model", projection_dim=64),
            projection_dim=64,
            image_token_index=300,
        ),
        embedding_dim=32,
    ),
    auto="ColPaliForRetrieval",
    model_kw=POOL,
    unfuse=lambda k: k,
)

# ruff: noqa
# fmt: off
# Kept line for line as first written, so that versions can be compared.
# A changed expectation is marked "Changed:" and says why.
"""Public bug reports of people who move weights, each as a small loader.  The format is in harness.py."""

import torch
from harness import new_like, rnd

BF, F32, F8, U8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.uint8


# A1 -------------------------------------------------------------------------------------------
def case_composed_loader_copies_twice():
    """vllm-project/vllm#44814: A is copied, then rewritten in place from itself; D, loaded last, was dropped."""
    T = {
        "mixer.A": rnd((4,), F32, 1),
        "mixer.dt_bias": rnd((4,), BF, 2),
        "mixer.D": rnd((4,), BF, 3),
        "mixer.norm": rnd((6,), BF, 4),
    }
    ck = {
        "mixer.A_log": rnd((8,), F32, 5),
        "mixer.dt_bias": rnd((8,), BF, 6),
        "mixer.D": rnd((8,), BF, 7),
        "mixer.norm.weight": rnd((6,), BF, 8),
    }
    rank = 1

    def load(t, weights):
        rename = {"mixer.A_log": "mixer.A", "mixer.norm.weight": "mixer.norm"}
        for name, w in weights:
            p = t[rename.get(name, name)]
            if p.shape != w.shape:
                w = w.narrow(0, rank * p.shape[0], p.shape[0])
            p.data.copy_(w)
            if name == "mixer.A_log":
                p.data.copy_(-torch.exp(p.data))

    names = dict.fromkeys(ck, "direct") | {"mixer.A_log": "fallback"}
    boxes = {"mixer.D": [((4, 8),)], "mixer.dt_bias": [((4, 8),)], "mixer.norm.weight": [((0, 6),)]}
    return dict(
        targets=T, checkpoint=ck, load=load, updates=[new_like(ck, 20)], expect=dict(names=names, boxes=boxes)
    )


# A2 -------------------------------------------------------------------------------------------
def case_runtime_buffers_keep_their_bytes():
    """vllm-project/vllm#44371: a non-persistent scalar buffer and a rope table came back as meta garbage."""
    T = {
        "router.proj.weight": rnd((4, 6), BF, 1),
        "router.root_size": torch.tensor(0.018798828125, dtype=BF),
        "rope.cos_sin": rnd((8, 4), F32, 2),
    }
    ck = {"router.proj.weight": rnd((4, 6), BF, 3), "rope.inv_freq": rnd((2,), F32, 4)}

    def load(t, weights):
        for name, w in weights:
            if "inv_freq" in name:
                continue
            t[name].data.copy_(w)

    return dict(
        targets=T,
        checkpoint=ck,
        load=load,
        updates=[new_like(ck, 30), new_like(ck, 40)],
        expect=dict(
            names={"router.proj.weight": "direct", "rope.inv_freq": "unneeded"},
            keep=["router.root_size", "rope.cos_sin"],
        ),
    )


# A3 -------------------------------------------------------------------------------------------
def case_parent_buffer_aliases_child_param():
    """vllm-project/vllm#42481: conv_weights is a view of conv1d.weight; the copy-back broke the alias."""
    w = rnd((12, 1, 3), BF, 1)
    T = {"conv1d.weight": w, "conv_weights": w.view(12, 3), "conv1d.bias": rnd((12,), BF, 2)}
    ck = {"conv1d.weight": rnd((24, 1, 3), BF, 3), "conv1d.bias": rnd((24,), BF, 4)}

    def load(t, weights):
        for name, v in weights:
            p = t[name]
            p.data.copy_(v.narrow(0, 12, 12))

    return dict(
        targets=T,
        checkpoint=ck,
        load=load,
        updates=[new_like(ck, 9)],
        expect=dict(
            names=dict.fromkeys(ck, "direct"),
            boxes={"conv1d.weight": [((12, 24), (0, 1), (0, 3))], "conv1d.bias": [((12, 24),)]},
        ),
    )


# A4 -------------------------------------------------------------------------------------------
def case_tied_head_redundant_copy_skipped():
    """vllm-project/vllm#6758, NVIDIA-NeMo/labs-molt#26: the file has a stale lm_head beside the tied embedding."""
    emb = rnd((8, 4), BF, 1)
    T = {"embed.weight": emb, "lm_head.weight": emb, "norm.weight": rnd((4,), BF, 2)}
    ck = {
        "lm_head.weight": rnd((8, 4), BF, 3),
        "model.embed.weight": rnd((8, 4), BF, 4),
        "model.norm.weight": rnd((4,), BF, 5),
    }

    def load(t, weights):
        tied = t["lm_head.weight"] is t["embed.weight"]
        for name, w in weights:
            if tied and name.startswith("lm_head."):
                continue
            t[name.removeprefix("model.")].data.copy_(w)

    return dict(
        targets=T,
        checkpoint=ck,
        load=load,
        updates=[new_like(ck, 11)],
        expect=dict(
            names={"lm_head.weight": "unneeded", "model.embed.weight": "direct", "model.norm.weight": "direct"}
        ),
    )


# A5 -------------------------------------------------------------------------------------------
def case_head_filled_from_live_embedding():
    """sgl-project/sglang#1508: after the loop lm_head (its own storage) is copied from the live embedding.

    A tracer that never wrote the embedding copies old bytes into lm_head and leaves it stale for good."""
    T = {"embed.weight": rnd((6, 4), BF, 1), "lm_head.weight": rnd((6, 4), BF, 2), "norm.weight": rnd((4,), BF, 3)}
    ck = {"embed.weight": rnd((6, 4), BF, 4), "norm.weight": rnd((4,), BF, 5)}

    def load(t, weights):
        for name, w in weights:
            t[name].data.copy_(w)
        t["lm_head.weight"].data.copy_(t["embed.weight"].data)

    return dict(
        targets=T,
        checkpoint=ck,
        load=load,
        updates=[new_like(ck, 13)],
        expect=dict(
            names={"embed.weight": "either", "norm.weight": "direct"}, prefer={"embed.weight": "direct, two places"}
        ),
    )


# A6 -------------------------------------------------------------------------------------------
def case_moe_up_before_gate_with_expert_parallel():
    """vllm-project/vllm#42821, NovaSky-AI/SkyRL#1680: the kernel wants [up; gate]; experts 0 and 1 live elsewhere."""
    E, I, H, tp, rank = 4, 6, 5, 2, 1
    emap = {2: 0, 3: 1}
    T = {"w13": rnd((2, I // tp * 2, H), BF, 1), "w2": rnd((2, H, I // tp), BF, 2)}
    ck = {}
    for e in range(E):
        for j, (n, s) in enumerate((("gate", (I, H)), ("up", (I, H)), ("down", (H, I)))):
            ck[f"experts.{e}.{n}_proj.weight"] = rnd(s, BF, 10 + 3 * e + j)

    def load(t, weights):
        n = I // tp
        for name, w in weights:
            _, e, proj, _ = name.split(".")
            local = emap.get(int(e), -1)
            if local == -1:
                continue
            if proj == "down_proj":
                t["w2"].data[local].copy_(w.narrow(1, rank * n, n))
            else:
                half = 0 if proj == "up_proj" else n
                t["w13"].data[local].narrow(0, half, n).copy_(w.narrow(0, rank * n, n))

    names = {n: "direct" if int(n.split(".")[1]) in emap else "unneeded" for n in ck}
    boxes = {
        n: [((3, 6), (0, 5))] if "down" not in n else [((0, 5), (3, 6))] for n, k in names.items() if k == "direct"
    }
    return dict(
        targets=T, checkpoint=ck, load=load, updates=[new_like(ck, 50)], expect=dict(names=names, boxes=boxes)
    )


# A7 -------------------------------------------------------------------------------------------
def case_gpt_oss_interleaved_and_square_transpose():
    """THUDM/slime#1840: gate/up interleaved by column, and H == I hides a missing transpose of down_proj."""
    E, H, I = 2, 4, 4
    T = {"w13": rnd((E, 2 * I, H), BF, 1), "w13_bias": rnd((E, 2 * I), BF, 2), "w2": rnd((E, H, I), BF, 3)}
    ck = {
        "experts.gate_up_proj": rnd((E, H, 2 * I), BF, 4),
        "experts.gate_up_proj_bias": rnd((E, 2 * I), BF, 5),
        "experts.down_proj": rnd((E, I, H), BF, 6),
    }

    def load(t, weights):
        for name, w in weights:
            if name.endswith("down_proj"):
                t["w2"].data.copy_(w.transpose(1, 2))
                continue
            p = t["w13_bias"] if name.endswith("bias") else t["w13"]
            if not name.endswith("bias"):
                w = w.permute(0, 2, 1)
            p.data[:, :I].copy_(w[:, 0::2])
            p.data[:, I:].copy_(w[:, 1::2])

    return dict(
        targets=T,
        checkpoint=ck,
        load=load,
        updates=[new_like(ck, 60)],
        expect=dict(
            names={
                "experts.down_proj": "direct",
                "experts.gate_up_proj": "either",
                "experts.gate_up_proj_bias": "either",
            },
            prefer={"experts.gate_up_proj": "direct (strided source)"},
        ),
    )


# A8 -------------------------------------------------------------------------------------------
def case_kv_heads_replicated_across_ranks():
    """vllm-project/vllm#46755, huggingface/transformers#48307: fewer KV heads than ranks; ranks 2 and 3 share one."""
    hd, H, nq, nkv, tp, rank = 2, 5, 8, 2, 4, 3
    T = {"qkv.weight": rnd(((nq // tp + 2) * hd, H), BF, 1), "qkv.bias": rnd(((nq // tp + 2) * hd,), BF, 2)}
    ck = {}
    for i, (p, n) in enumerate((("q", nq), ("k", nkv), ("v", nkv))):
        ck[f"{p}_proj.weight"] = rnd((n * hd, H), BF, 3 + i)
        ck[f"{p}_proj.bias"] = rnd((n * hd,), BF, 6 + i)

    def load(t, weights):
        q = nq // tp * hd
        for name, w in weights:
            p = t["qkv." + name.split(".")[1]].data
            if name[0] == "q":
                p.narrow(0, 0, q).copy_(w.narrow(0, rank * q, q))
            else:
                at = q if name[0] == "k" else q + hd
                head = rank // (tp // nkv)
                p.narrow(0, at, hd).copy_(w.narrow(0, head * hd, hd))

    boxes = {}
    for n, w in ck.items():
        rows = (12, 16) if n[0] == "q" else (2, 4)
        boxes[n] = [(rows,) + ((0, H),) * (w.dim() - 1)]
    return dict(targets=T, checkpoint=ck, load=load, expect=dict(names=dict.fromkeys(ck, "direct"), boxes=boxes))


# A9 -------------------------------------------------------------------------------------------
def case_halves_fused_only_when_both_arrive():
    """sgl-project/sglang#38298: q_a and kv_a are concatenated, but the pending half lived inside one call.

    Truth is the load of everything in one call; arrival in two buckets must not lose the pair."""
    T = {"fused_qkv_a": rnd((7, 4), BF, 1), "norm": rnd((4,), BF, 2)}
    ck = {"q_a.weight": rnd((4, 4), BF, 3), "norm": rnd((4,), BF, 4), "kv_a.weight": rnd((3, 4), BF, 5)}

    def load(t, weights):
        pending = {}
        for name, w in weights:
            if name not in ("q_a.weight", "kv_a.weight"):
                t[name].data.copy_(w)
                continue
            pending[name] = w
            if len(pending) == 2:
                t["fused_qkv_a"].data.copy_(torch.cat([pending["q_a.weight"], pending["kv_a.weight"]], 0))

    return dict(
        targets=T,
        checkpoint=ck,
        load=load,
        buckets=[["q_a.weight", "norm"], ["kv_a.weight"]],
        updates=[new_like(ck, 14)],
        expect=dict(names={"q_a.weight": "group", "kv_a.weight": "group", "norm": "direct"}),
    )


# A10 ------------------------------------------------------------------------------------------
def case_loader_holds_tensors_sender_reuses_memory():
    """vllm-project/vllm#43464: the loader keeps what it was given until the loop ends; the streamer reuses it."""
    T = {"a": rnd((3, 4), BF, 1), "b": rnd((4,), F32, 2), "c": rnd((2, 4), BF, 3), "d": rnd((3,), BF, 7)}
    ck = {"c": rnd((4, 4), BF, 4), "d": rnd((3,), F32, 8), "a": rnd((6, 4), BF, 5), "b": rnd((4,), F32, 6)}

    def load(t, weights):
        held = []
        for name, w in weights:
            p = t[name]
            held.append((p, w if p.shape == w.shape else w.narrow(0, p.shape[0], p.shape[0])))
        for p, w in reversed(held):
            p.data.copy_(w)

    return dict(
        targets=T,
        checkpoint=ck,
        load=load,
        reuse_buffer=True,
        updates=[new_like(ck, 70)],
        expect=dict(
            names=dict.fromkeys(ck, "direct") | {"d": "fallback"},
            boxes={"c": [((2, 4), (0, 4))], "a": [((3, 6), (0, 4))], "b": [((0, 4),)]},
        ),
    )


# A11 ------------------------------------------------------------------------------------------
def case_copy_that_casts():
    """NVIDIA-NeMo/RL#3540, vllm-project/vllm#50761: router bias is FP32 in the file and BF16 in the layer."""
    T = {
        "gate.weight": rnd((4, 6), BF, 1),
        "gate.bias": torch.zeros(4, dtype=BF),
        "gate.weight_fp32": rnd((4, 6), F32, 2),
    }
    ck = {
        "gate.weight": rnd((4, 6), BF, 3),
        "gate.e_score_correction_bias": rnd((4,), F32, 4) * 0.1 + 6.9,
        "shadow.weight": rnd((4, 6), BF, 5),
    }

    def load(t, weights):
        where = {"gate.e_score_correction_bias": "gate.bias", "shadow.weight": "gate.weight_fp32"}
        for name, w in weights:
            t[where.get(name, name)].data.copy_(w)

    return dict(
        targets=T,
        checkpoint=ck,
        load=load,
        updates=[new_like(ck, 80)],
        expect=dict(
            names={"gate.weight": "direct", "gate.e_score_correction_bias": "fallback", "shadow.weight": "either"}
        ),
    )


# A12 ------------------------------------------------------------------------------------------
def case_shard_smaller_than_scale_block():
    """vllm-project/vllm#52997, #52915: two ranks' rows sit in one quantization block and need the same scale row."""
    block, I, H, tp, rank = 4, 8, 8, 4, 1
    n = I // tp
    T = {"gate_up.weight": rnd((2 * n, H), F8, 1), "gate_up.scale": rnd((2, H // block), F32, 2)}
    ck = {}
    for i, p in enumerate(("gate", "up")):
        ck[f"{p}.weight"] = rnd((I, H), F8, 3 + i)
        ck[f"{p}.weight_scale_inv"] = rnd((I // block, H // block), F32, 5 + i)

    def load(t, weights):
        for name, w in weights:
            half = 0 if name.startswith("gate.") else 1
            if name.endswith("scale_inv"):
                row = rank * n // block
                t["gate_up.scale"].data[half].copy_(w[row])
            else:
                t["gate_up.weight"].data[half * n : (half + 1) * n].copy_(w[rank * n : (rank + 1) * n])

    boxes = {}
    for p in ("gate", "up"):
        boxes[f"{p}.weight"] = [((2, 4), (0, 8))]
        boxes[f"{p}.weight_scale_inv"] = [((0, 1), (0, 2))]
    return dict(
        targets=T,
        checkpoint=ck,
        load=load,
        updates=[new_like(ck, 90)],
        expect=dict(names=dict.fromkeys(ck, "direct"), boxes=boxes),
    )


# A13 ------------------------------------------------------------------------------------------
def case_scalar_scales_and_value_reads():
    """vllm-project/vllm#46430: 0-d and 1-element scales go to one slot; one loader reads .item()."""
    E = 3
    T = {
        "w13_scale": rnd((E, 2), F32, 1),
        "w2_scale": rnd((E,), F32, 2),
        "input_scale": rnd((E,), F32, 3),
        "weight_shape": rnd((E, 2), torch.int64, 4),
    }
    ck = {}
    for e in range(E):
        ck[f"experts.{e}.w1.weight_scale"] = rnd((), F32, 10 + e)
        ck[f"experts.{e}.w3.weight_scale"] = rnd((), F32, 20 + e)
        ck[f"experts.{e}.w2.weight_scale"] = rnd((1,), F32, 30 + e)
        ck[f"experts.{e}.w2.input_scale"] = rnd((1,), F32, 40 + e)
        ck[f"experts.{e}.w2.weight_shape"] = rnd((2,), torch.int64, 50 + e)

    def load(t, weights):
        for name, w in weights:
            _, e, part, leaf = name.split(".")
            e = int(e)
            if leaf == "input_scale":
                t["input_scale"].data[e].fill_(w.item())
            elif leaf == "weight_shape":
                t["weight_shape"].data[e].copy_(w)
            elif part == "w2":
                t["w2_scale"].data[e].copy_(w.reshape(()))
            else:
                t["w13_scale"].data[e, 0 if part == "w1" else 1] = w

    names = {n: "fallback" if n.endswith("input_scale") else "direct" for n in ck}
    reads = [n for n in ck if n.endswith("input_scale")]
    return dict(
        targets=T, checkpoint=ck, load=load, updates=[new_like(ck, 100)], expect=dict(names=names, value_read=reads)
    )


# A14 ------------------------------------------------------------------------------------------
def case_vocab_padding_rewritten_each_time():
    """vllm-project/vllm#12230, NVIDIA-NeMo/Megatron-Bridge#5353: rank 1 holds 2 real rows and 6 of padding.

    Something else dirties the padding between updates; the loader's zeros must land again."""
    H, rows, rank = 4, 8, 1
    T = {"embed.weight": torch.full((rows, H), float("nan"), dtype=BF)}
    ck = {"embed.weight": rnd((10, H), BF, 1)}

    def load(t, weights):
        for name, w in weights:
            p = t[name].data
            real = min(w.shape[0] - rank * rows, rows)
            p[:real].copy_(w.narrow(0, rank * rows, real))
            p[real:].fill_(0)

    return dict(
        targets=T,
        checkpoint=ck,
        load=load,
        updates=[new_like(ck, 2), new_like(ck, 3)],
        between=lambda t: t["embed.weight"].data[2:].fill_(float("nan")),
        expect=dict(names={"embed.weight": "direct"}, boxes={"embed.weight": [((8, 10), (0, H))]}),
    )


# A15 ------------------------------------------------------------------------------------------
def case_packed_expert_name_silently_skipped():
    """sgl-project/sglang#38616, 1CatAI/1Cat-vLLM#21: the loader knows per-expert names, the file has packed ones."""
    T = {"w13": rnd((2, 4, 3), BF, 1), "w2": rnd((2, 3, 2), BF, 2), "norm": rnd((3,), BF, 3)}
    ck = {
        "experts.gate_up_proj": rnd((2, 4, 3), BF, 4),
        "experts.0.down_proj.weight": rnd((3, 2), BF, 5),
        "experts.1.down_proj.weight": rnd((3, 2), BF, 6),
        "norm": rnd((3,), BF, 7),
    }

    def load(t, weights):
        for name, w in weights:
            parts = name.split(".")
            if len(parts) == 4 and parts[2] == "down_proj":
                t["w2"].data[int(parts[1])].copy_(w)
            elif name in t:
                t[name].data.copy_(w)

    names = dict.fromkeys(ck, "direct") | {"experts.gate_up_proj": "unneeded"}
    return dict(
        targets=T, checkpoint=ck, load=load, expect=dict(names=names, finish="error", says=["w13"])
    )


# A16 ------------------------------------------------------------------------------------------
def case_loader_rebinds_param_storage():
    """sgl-project/sglang#4961: param.data = new tensor moves the address that a CUDA graph has recorded."""
    T = {"w_kc": rnd((2, 3, 4), BF, 1), "norm": rnd((4,), BF, 2)}
    ck = {"kv_b.weight": rnd((6, 4), BF, 3), "norm": rnd((4,), BF, 4)}

    def load(t, weights):
        for name, w in weights:
            if name == "kv_b.weight":
                t["w_kc"].data = w.unflatten(0, (2, 3)).contiguous()
            else:
                t[name].data.copy_(w)

    return dict(
        targets=T,
        checkpoint=ck,
        load=load,
        expect=dict(
            names={"kv_b.weight": "either", "norm": "direct"}, rebind=True, says=["kv_b.weight", "w_kc"]
        ),
    )


# A17 ------------------------------------------------------------------------------------------
def case_every_view_op_a_loader_uses():
    """pytorch/pytorch#86284, #180822: view kernels of a fake device that do not alias, and empty views."""
    views = {
        "select": lambda w: w[1],
        "narrow": lambda w: w.narrow(1, 2, 3),
        "negative": lambda w: w[-2:, :-1],
        "transpose": lambda w: w.transpose(0, 1),
        "permute": lambda w: w.view(4, 2, 3).permute(2, 0, 1),
        "view": lambda w: w.view(2, 12),
        "view_infer": lambda w: w.view(-1),
        "reshape": lambda w: w.reshape(8, 3),
        "unflatten": lambda w: w.unflatten(1, (2, 3))[:, 1],
        "flatten": lambda w: w.flatten(),
        "unsqueeze": lambda w: w.unsqueeze(0),
        "squeeze": lambda w: w.narrow(0, 3, 1).squeeze(0),
        "unbind": lambda w: w.unbind(0)[2],
        "chunk": lambda w: w.chunk(2, dim=1)[1],
        "split": lambda w: w.split([1, 2, 3], dim=1)[2],
        "tensor_split": lambda w: w.tensor_split(3, dim=0)[1],
        "movedim": lambda w: w.view(2, 2, 6).movedim(0, -1),
        "T": lambda w: w.T,
        "mT": lambda w: w.mT[2:4],
        "swapaxes": lambda w: w.swapaxes(0, 1),
        "ellipsis": lambda w: w[..., 1:4],
        "none": lambda w: w[:, None, 2:],
        "as_strided": lambda w: w.as_strided((2, 6), (6, 1), 6),
        "view_as": lambda w: w.view_as(torch.empty(3, 8)),
        "hsplit": lambda w: w.hsplit(3)[0],
        "view_then_view": lambda w: w.narrow(0, 1, 2).t().narrow(0, 3, 2).t(),
    }
    either = {
        "step": lambda w: w[:, ::2],
        "diagonal": lambda w: w.diagonal(),
        "unfold": lambda w: w.view(-1).unfold(0, 3, 3),
    }
    empty = {"empty": lambda w: w.narrow(0, 2, 0)}
    ops = views | either | empty
    ck = {n: rnd((4, 6), BF, 200 + i) for i, n in enumerate(ops)}
    T = {n: rnd(ops[n](ck[n]).shape, BF, 300 + i) for i, n in enumerate(ops)}

    def load(t, weights):
        for name, w in weights:
            t[name].data.copy_(ops[name](w))

    names = dict.fromkeys(views, "direct") | dict.fromkeys(either, "either") | dict.fromkeys(empty, "unneeded")
    return dict(
        targets=T,
        checkpoint=ck,
        load=load,
        updates=[new_like(ck, 400)],
        required=[n for n in T if n != "empty"],
        expect=dict(names=names),
    )


# A18 ------------------------------------------------------------------------------------------
def case_loader_that_looks_but_does_not_read():
    """vllm-project/vllm#57804 and habit: loaders ask a tensor for everything but its values, then hop devices."""
    T = {"sinks": rnd((4,), BF, 1), "o.weight": rnd((6, 4), BF, 2), "q.weight": rnd((4, 6), BF, 3)}
    ck = {"sinks": rnd((8,), BF, 4), "o.weight": rnd((6, 8), BF, 5), "q.weight": rnd((8, 6), BF, 6)}
    log = []

    def load(t, weights):
        for name, w in weights:
            p = t[name]
            assert isinstance(w, torch.Tensor) and w.dim() in (1, 2) and len(w) == w.shape[0]
            log.append(f"{name} {tuple(w.shape)} {w.dtype} {w.device} {w.stride()} {w.storage_offset()}")
            log.append((w.numel() * w.element_size(), w.nbytes, w.is_contiguous(), w.is_floating_point()))
            w = w.detach().data.to(p.dtype).to(p.device).contiguous()
            d = 1 if name == "o.weight" else 0
            p.data.copy_(w.narrow(d, p.shape[d], p.shape[d]))

    return dict(
        targets=T,
        checkpoint=ck,
        load=load,
        expect=dict(
            names=dict.fromkeys(ck, "direct"),
            boxes={"sinks": [((4, 8),)], "o.weight": [((0, 6), (4, 8))], "q.weight": [((4, 8), (0, 6))]},
        ),
    )


# A19 ------------------------------------------------------------------------------------------
def case_one_logical_expert_in_two_slots():
    """vllm-project/vllm#55228: EPLB placement [0, 2, 1, 3, 2]; expert 2 has a replica, both must be written.

    Between the updates the placement moves; a plan made for the old one must not be used."""
    place = [0, 2, 1, 3, 2]
    T = {"w2": rnd((5, 3, 2), BF, 1)}
    ck = {f"experts.{e}.down_proj.weight": rnd((3, 2), BF, 2 + e) for e in range(4)}

    def load(t, weights):
        for name, w in weights:
            logical = int(name.split(".")[1])
            for slot, e in enumerate(place):
                if e == logical:
                    t["w2"].data[slot].copy_(w)

    def rebalance(t):
        place[:] = [3, 2, 1, 0, 0]

    return dict(
        targets=T,
        checkpoint=ck,
        load=load,
        token=lambda: tuple(place),
        between=rebalance,
        updates=[new_like(ck, 9)],
        expect=dict(names=dict.fromkeys(ck, "direct")),
    )


# A20 ------------------------------------------------------------------------------------------
def case_uneven_trainer_shards():
    """pytorch/torchtitan#4593, #3549: 5 rows over 2 ranks are 3 + 2; the second shard is stored padded to 3."""
    T = {"w": rnd((5, 3), BF, 1), "norm": rnd((5,), F32, 2)}
    ck = {"w": rnd((5, 6), BF, 3), "norm": rnd((5,), F32, 4)}

    def load(t, weights):
        for name, w in weights:
            t[name].data.copy_(w.narrow(1, 3, 3) if name == "w" else w)

    pad = torch.full((3, 6), float("nan"), dtype=BF)
    pad[:2] = ck["w"][3:]
    shards = {
        "w": [(0, ((0, 3), (0, 6)), ck["w"][:3].clone()), (1, ((3, 5), (0, 6)), pad[:2])],
        "norm": [(0, ((0, 3),), ck["norm"][:3].clone()), (1, ((3, 5),), ck["norm"][3:].clone())],
    }
    gap = dict(shards, w=[shards["w"][0], (1, ((4, 5), (0, 6)), pad[1:2])])
    both = dict(shards, w=[shards["w"][0], (1, ((2, 5), (0, 6)), torch.zeros(3, 6, dtype=BF))])
    cast = dict(shards, norm=[shards["norm"][0], (1, ((3, 5),), ck["norm"][3:].to(BF))])
    return dict(
        targets=T,
        checkpoint=ck,
        load=load,
        shards=shards,
        bad_shards=[gap, both, cast],
        expect=dict(names=dict.fromkeys(ck, "direct"), boxes={"w": [((0, 5), (3, 6))], "norm": [((0, 5),)]}),
    )


# A21 ------------------------------------------------------------------------------------------
def case_partial_reads_of_odd_files():
    """safetensors/safetensors#839, #439, #560, #844: E8M0, 0-d, empty, and data that starts at odd offsets."""
    T = {
        "q": rnd((3,), U8, 1),
        "scale": rnd((2, 2), torch.float8_e8m0fnu, 2),
        "w": rnd((2, 4), BF, 3),
        "alpha": rnd((), F32, 4),
        "fp8": rnd((2, 2), F8, 5),
    }
    ck = {
        "q": rnd((7,), U8, 6),
        "w": rnd((6, 4), BF, 7),
        "none": rnd((0, 4), BF, 8),
        "alpha": rnd((), F32, 9),
        "scale": rnd((2, 5), torch.float8_e8m0fnu, 10),
        "fp8": rnd((4, 3), F8, 11),
    }

    def load(t, weights):
        for name, w in weights:
            if name == "none":
                assert w.numel() == 0
                continue
            cut = {"q": (0, 4, 3), "w": (0, 4, 2), "scale": (1, 3, 2)}.get(name)
            if name == "fp8":
                w = w[1:3, 1:]
            t[name].data.copy_(w if cut is None else w.narrow(*cut))

    names = dict.fromkeys(ck, "direct") | {"none": "unneeded"}
    boxes = {
        "q": [((4, 7),)],
        "w": [((4, 6), (0, 4))],
        "scale": [((0, 2), (3, 5))],
        "fp8": [((1, 3), (1, 3))],
        "alpha": [()],
    }
    return dict(targets=T, checkpoint=ck, load=load, file=True, expect=dict(names=names, boxes=boxes))


# A22 ------------------------------------------------------------------------------------------
def case_loader_asserts_midway():
    """sgl-project/sglang#26015: the third name trips the loader's own assert; nothing may have moved by then."""
    T = {"a": rnd((3,), BF, 1), "b": rnd((2, 3), BF, 2), "shared": rnd((4, 3), BF, 3)}
    ck = {"a": rnd((3,), BF, 4), "b": rnd((2, 3), BF, 5), "experts.shared": rnd((8, 3), BF, 6), "c": rnd((1,), BF, 7)}

    def load(t, weights):
        for name, w in weights:
            if name == "c":
                continue
            p = t[name.removeprefix("experts.")]
            assert p.size() == w.size(), "size"
            p.data.copy_(w)

    return dict(
        targets=T,
        checkpoint=ck,
        load=load,
        expect=dict(names=dict.fromkeys(ck, "direct"), plan="error", says=["experts.shared"]),
    )


# A23 ------------------------------------------------------------------------------------------
def case_lora_merged_by_the_loader():
    """radixark/miles#1087, verl-project/verl#7327: base and adapter arrive apart; the product is added in place."""
    T = {"q.weight": rnd((4, 6), F32, 1), "k.weight": rnd((4, 6), F32, 2)}
    ck = {
        "q.base_layer.weight": rnd((4, 6), F32, 3),
        "q.lora_A.weight": rnd((2, 6), F32, 4),
        "q.lora_B.weight": rnd((4, 2), F32, 5),
        "k.weight": rnd((4, 6), F32, 6),
    }

    def load(t, weights):
        parts = {}
        for name, w in weights:
            leaf = name.split(".")[1]
            if leaf.startswith("lora"):
                parts[leaf] = w
            else:
                t[name.replace("base_layer.", "")].data.copy_(w)
        if parts:
            t["q.weight"].data.add_(parts["lora_B"] @ parts["lora_A"], alpha=0.5)

    names = dict.fromkeys(ck, "group") | {"k.weight": "direct"}
    return dict(targets=T, checkpoint=ck, load=load, updates=[new_like(ck, 44)], expect=dict(names=names))


# A24 ------------------------------------------------------------------------------------------
def case_stream_feeds_target_and_draft():
    """sgl-project/sglang#27718, vllm-project/vllm#46725: one stream, two models, one embedding between them."""
    emb = rnd((6, 4), BF, 1)
    T = {
        "embed": emb,
        "draft.embed": emb,
        "layers.0": rnd((4, 4), BF, 2),
        "draft.layers.0": rnd((4, 4), BF, 3),
        "draft.fc": rnd((4, 8), BF, 4),
    }
    ck = {"embed": rnd((6, 4), BF, 5), "layers.0": rnd((4, 4), BF, 6), "mtp.0": rnd((4, 4), BF, 7), "mtp.fc": rnd((4, 8), BF, 8)}

    def load(t, weights):
        seen = list(weights)
        for name, w in seen:
            if name in ("embed", "layers.0"):
                t[name].data.copy_(w)
        for name, w in seen:
            if name.startswith("mtp."):
                leaf = name.split(".")[1]
                t["draft.layers.0" if leaf == "0" else "draft.fc"].data.copy_(w)

    return dict(
        targets=T, checkpoint=ck, load=load, updates=[new_like(ck, 31)], expect=dict(names=dict.fromkeys(ck, "direct"))
    )


# A25 ------------------------------------------------------------------------------------------
def case_leaf_parameters_and_grad_mode():
    """pytorch/pytorch#163979: no autograd kernel for a new device; params are leaves that require grad."""
    P = torch.nn.Parameter
    T = {"a": P(rnd((3, 4), F32, 1)), "b": P(rnd((4,), F32, 2)), "c": P(rnd((4, 3), F32, 3))}
    ck = {"a": rnd((6, 4), F32, 4), "b": rnd((4,), F32, 5), "c": rnd((3, 4), F32, 6)}

    def load(t, weights):
        for name, w in weights:
            p = t[name]
            if name == "a":
                p.data.copy_(w.narrow(0, 3, 3))
            elif name == "b":
                with torch.no_grad():
                    p.copy_(w)
            else:
                with torch.no_grad():
                    p[:] = torch.nn.Parameter(w, requires_grad=False).t()

    return dict(targets=T, checkpoint=ck, load=load, expect=dict(names=dict.fromkeys(ck, "direct")))


# A26 ------------------------------------------------------------------------------------------
def case_two_names_for_one_region():
    """PrimeIntellect-ai/prime-rl#1820's review: a stored and a fresh scale for one weight, kept in arrival order."""
    T = {"qkv": rnd((6, 4), BF, 1), "scale": rnd((2, 2), F32, 2)}
    ck = {
        "qkv_proj.weight": rnd((6, 4), BF, 3),
        "scale_inv": rnd((2, 2), F32, 4),
        "k_proj.weight": rnd((2, 4), BF, 5),
        "weight_scale": rnd((2, 2), F32, 6),
        "v_proj.weight": rnd((2, 4), BF, 7),
    }

    def load(t, weights):
        rows = {"k_proj.weight": slice(2, 4), "v_proj.weight": slice(4, 6), "qkv_proj.weight": slice(None)}
        for name, w in weights:
            if "scale" in name:
                t["scale"].data.copy_(w)
            else:
                t["qkv"].data[rows[name]].copy_(w)

    return dict(
        targets=T,
        checkpoint=ck,
        load=load,
        orders=[list(ck), list(ck)[::-1]],
        expect=dict(names=dict.fromkeys(ck, "fallback"), overlap=list(ck)),
    )


# A27 ------------------------------------------------------------------------------------------
def case_cached_transform_buffer_on_the_layer():
    """vllm-project/vllm-ascend#13902: a buffer made on first load is filled in place and then copied to the weight."""
    T = {"weight": rnd((3, 4), F8, 1), "scale": rnd((2, 4), F32, 2), "norm": rnd((4,), BF, 3)}
    ck = {"weight": rnd((4, 6), F8, 4), "scale": rnd((4, 2), F32, 5), "norm": rnd((4,), BF, 6)}
    layer = {}

    def load(t, weights):
        for name, w in weights:
            if name == "weight":
                if "buf" not in layer:
                    layer["buf"] = torch.empty(6, 4, dtype=w.dtype)
                layer["buf"].copy_(w.t())
                t["weight"].data.copy_(layer["buf"][3:])
            else:
                t[name].data.copy_(w.t() if name == "scale" else w)

    return dict(
        targets=T,
        checkpoint=ck,
        load=load,
        updates=[new_like(ck, 35), new_like(ck, 36)],
        expect=dict(
            names={"weight": "either", "scale": "direct", "norm": "direct"},
            prefer={"weight": "direct"},
            value_read=["weight"],
        ),
    )


# A31 ------------------------------------------------------------------------------------------
def case_kernel_swaps_halves_after_loading():
    """vllm-project/vllm#42821, NVIDIA-NeMo/RL#3659: [gate; up] is swapped in place after loading, and back before it.

    The loader's layout is only live between restore and process; padding of the kernel layout is nobody's."""
    E, I, H = 2, 3, 4
    T = {"w13": rnd((E, 2 * I, H), BF, 1), "w2": rnd((E, H, H), BF, 2), "alpha": rnd((E,), F32, 3)}
    ck = {}
    for e in range(E):
        for j, (n, s) in enumerate((("w1", (I, H)), ("w3", (I, H)), ("w2", (H, H)))):
            ck[f"experts.{e}.{n}"] = rnd(s, BF, 10 + 3 * e + j)

    def load(t, weights):
        for name, w in weights:
            _, e, part = name.split(".")
            if part == "w2":
                t["w2"].data[int(e)].copy_(w)
            else:
                t["w13"].data[int(e)].narrow(0, 0 if part == "w1" else I, I).copy_(w)

    def swap(t):
        t["w13"].data.copy_(torch.cat([t["w13"].data[:, I:], t["w13"].data[:, :I]], 1))
        t["w2"].data.copy_(t["w2"].data.mT.clone())

    def process(t):
        swap(t)
        t["alpha"].data.copy_(t["w2"].data.float().abs().amax((1, 2)))

    return dict(
        targets=T,
        checkpoint=ck,
        load=load,
        restore=swap,
        process=process,
        required=["w13", "w2"],
        updates=[new_like(ck, 21), new_like(ck, 22)],
        expect=dict(names=dict.fromkeys(ck, "direct")),
    )


# ------------------------------------------------------------------ probes of the device itself
def probe_second_registration(api):
    """A28: pytorch/pytorch#163979, #134071, #129056: the same backend set up twice in one process is no error."""
    T = {"w": torch.zeros(2, 3)}
    api.register_again()
    for _ in range(2):
        with api.tracing(T, [("w", (2, 3), F32)]):
            T["w"].copy_(api.trace("w"))
        assert api.kind("w") == "direct"
    assert not T["w"].any(), "tracing wrote live memory"


def probe_views_keep_layout_and_identity(api):
    """A29: pytorch/pytorch#86284, #159660: a view on the fake device shares its base's layout, strides included."""
    T = {"w": torch.zeros(3, 2)}
    with api.tracing(T, [("w", (4, 6), F32)]):
        w, real = api.trace("w"), torch.empty(4, 6)
        for f in (
            lambda x: x.t(),
            lambda x: x[1:, ::2],
            lambda x: x.view(2, 2, 6).permute(2, 0, 1),
            lambda x: x.unflatten(1, (2, 3)).select(1, 1),
            lambda x: x.as_strided((2, 2), (6, 2), 3),
            lambda x: x.expand(5, 4, 6),
            lambda x: x.narrow(0, 2, 0),
        ):
            a, b = f(w), f(real)
            assert (a.shape, a.stride(), a.storage_offset()) == (b.shape, b.stride(), b.storage_offset())
            assert a.is_contiguous() == b.is_contiguous() and a.dtype == b.dtype
        T["w"].copy_(w[1:].t()[:2].t())
    assert api.kind("w") == "direct"


def probe_op_without_a_trace_kernel(api):
    """A30: pytorch/pytorch#40564, #99611: an op nobody registered loses the geometry; it never touches a null pointer."""
    T = {n: torch.zeros(3, 3) for n in ("sort", "matmul", "where", "plain")}
    with api.tracing(T, [(n, (3, 3), F32) for n in T]):
        T["sort"].copy_(torch.sort(api.trace("sort"), dim=0).values)
        T["matmul"].copy_(api.trace("matmul") @ torch.eye(3))
        T["where"].copy_(torch.where(torch.ones(3, 3, dtype=torch.bool), api.trace("where"), 0.0))
        T["plain"].copy_(api.trace("plain"))
    kinds = {n: api.kind(n) for n in T}  # a constant mask may be followed: `where` is then direct
    where = kinds.pop("where")
    assert where in ("fallback", "direct") and kinds == {"sort": "fallback", "matmul": "fallback", "plain": "direct"}, kinds
    assert all(api.reason(n) for n in ("sort", "matmul")) and (where == "direct" or api.reason("where"))

# ruff: noqa
# fmt: off
# Kept line for line as first written, so that versions can be compared.
# A changed expectation is marked "Changed:" and says why.
"""Cases for the trace device and load plans: format, truth, oracle, shim, checker.  Pure torch, CPU only.

A case is a function ``case_xxx()`` that builds everything afresh and returns a dict:

  targets     name -> live CPU tensor.  Two names may share one storage (alias, tie).
  checkpoint  name -> CPU tensor, in arrival order.
  load        load(targets, iterator of (name, tensor)): the model's own loader.
  expect      what a RIGHT system does:
    names      checkpoint name -> kind
                 direct     must be planned; every byte it writes is a copy of one of its own bytes
                 fallback   must NOT be planned direct; goes through `load` with its real bytes
                 either     direct or fallback, but the values must be right (`prefer` says which is better)
                 unneeded   nothing of it is needed on this rank: nothing is sent, read or written
                 group      combined with other names: the plan refuses and names one of them, or they are all
                            direct, or they are all handed to ONE load call together.  Never "unneeded".
    prefer     checkpoint name -> kind a good system reaches (not a failure if it does not)
    overlap    names whose writes share bytes with another name's (so order matters)
    boxes      checkpoint name -> list of boxes ((start, stop) per dim): the exact elements this rank needs
    plan       "ok" (default) | "error": planning raises, `says` in the message, targets bit-identical after
    finish     "ok" (default) | "error": finish raises, `says` in the message
    says       strings of which at least one must be in the error's message
    keep       target names whose bytes must not change
    rebind     True: the loader replaces storage; right = refuse at plan time, or values right AND storage kept
  Optional keys:
    orders        arrival orders; the truth of each is the eager load in that order
    updates       later checkpoints (dicts) run through the SAME plan, targets carried over
    between       between(targets): run before each later update (kernels dirty padding, maps move, ...)
    buckets       arrival in several chunks (lists of names), one update
    reuse_buffer  True: the sender overwrites each tensor's memory as soon as the next one is asked for
    stream        list of (name, tensor) replacing checkpoint.items() (duplicate declarations)
    arrive        checkpoint actually sent, where it differs from the declared one
    required      target names that must be covered (default: all but `keep`)
    partial       list of names sent in update 2 where update 2 is incomplete
    shards        name -> list of pieces (rank, global box, tensor): trainer shards, M x N execution
    bad_shards    list of such dicts: each must be refused before any byte is written
    file          True: also run from a safetensors file, reading only what is needed
    token         token() -> value that identifies the placement the plan was made for
  restore       restore(targets): kernel layout -> load layout, in place; run_case calls it as start_reload would,
                before planning and before each update
  process       process(targets): load layout -> kernel layout, in place; called once after each update

Truth for values: always `load` run eagerly on the real CPU tensors (eager()).

Shim: subclass Product for the system under test and call run_case(case_fn, product) for each of cases(module);
it returns a list of failures.  `python harness.py [a|b]` checks the cases themselves:
  eager   every loader runs on plain CPU torch (or raises, where `plan` is "error")
  oracle  labels and boxes agree with byte provenance found from eager runs on random bytes alone
Besides cases a file may hold probes: probe_xxx(api) checks the device itself, without a loader (see Api).
"""

from __future__ import annotations

import json
import os
import struct
import sys
import tempfile

import torch

KINDS = {"direct", "fallback", "either", "unneeded", "group"}


# ------------------------------------------------------------------ helpers the cases use
def rnd(shape, dtype=torch.float32, seed=0):
    """Deterministic values; small-float and integer dtypes get random bytes."""
    g = torch.Generator().manual_seed(seed * 7919 + 17)
    shape = tuple(shape)
    if dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        return torch.randn(shape, generator=g).to(dtype)
    item = torch.empty((), dtype=dtype).element_size()
    n = 1
    for s in shape:
        n *= s
    raw = torch.randint(0, 120, (n * item,), generator=g, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape) if n else torch.empty(shape, dtype=dtype)


def new_like(ck, seed):
    """Another checkpoint of the same names, shapes and dtypes."""
    return {k: rnd(v.shape, v.dtype, seed + i) for i, (k, v) in enumerate(ck.items())}


# ------------------------------------------------------------------ bytes and storages
def raw(t):
    """Whole storage of t as a uint8 tensor (aliases it)."""
    s = t.untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(s, 0, (s.nbytes(),), (1,))


def region(t):
    """Byte offsets in its storage of every element byte of t, row-major; int64 [numel, itemsize]."""
    idx = torch.zeros(t.shape, dtype=torch.int64) + t.storage_offset()
    for d, (n, s) in enumerate(zip(t.shape, t.stride())):
        view = [1] * t.dim()
        view[d] = n
        idx = idx + (torch.arange(n, dtype=torch.int64) * s).view(view)
    size = t.element_size()
    return idx.reshape(-1, 1) * size + torch.arange(size, dtype=torch.int64)


def bytes_of(t):
    """Row-major bytes of a tensor, as a fresh uint8 [numel * itemsize]."""
    return raw(t)[region(t).reshape(-1)].clone()


def storages(targets):
    return {t.untyped_storage()._cdata: raw(t) for t in targets.values()}


def address(t):
    try:
        return t.data_ptr()
    except RuntimeError:
        return None


def snapshot(targets):
    return {n: bytes_of(t) for n, t in targets.items()}


def same(a, b):
    return [n for n in a if n not in b or not torch.equal(a[n], b[n])]


# ------------------------------------------------------------------ truth
def stream_of(case, order=None):
    items = case.get("stream") or list(case["checkpoint"].items())
    if order is not None:
        ck = dict(items)
        items = [(n, ck[n]) for n in order]
    return items


def eager(case, items=None, process=True):
    """Run the loader on the real tensors; returns the targets' bytes."""
    items = stream_of(case) if items is None else items
    case.get("restore", nothing)(case["targets"])
    case["load"](case["targets"], iter([(n, t.clone()) for n, t in items]))
    if process:
        case.get("process", nothing)(case["targets"])
    return snapshot(case["targets"])


def nothing(targets):
    pass


# ------------------------------------------------------------------ oracle: provenance from eager runs alone
def _randomize(t, g):
    b = raw(t)
    b.copy_(torch.randint(0, 256, b.shape, generator=g, dtype=torch.uint8))


def provenance(fn, trials=8, seed=1):
    """(deps, copies): per checkpoint name, target bytes that change with it; per target byte, the checkpoint
    byte it always equals.  Uses nothing but eager loads on random bytes."""
    outs, srcs = [], []
    base = fn()
    names = [n for n, _ in stream_of(base)]

    def one(s, change=None):
        g = torch.Generator().manual_seed(s)
        c = fn()
        for t in c["targets"].values():
            _randomize(t, g)
        items = [(n, t.clone()) for n, t in stream_of(c)]
        for n, t in items:
            _randomize(t, g)
            if n == change:
                _randomize(t, torch.Generator().manual_seed(s + 100003))
        init = {n: bytes_of(t) for n, t in c["targets"].items()}
        out = eager(c, items, process=False)
        return init, items, out

    for k in range(trials):
        init, items, out = one(seed + k)
        srcs.append({n: bytes_of(t) for n, t in items})
        outs.append(out)
    where = {}
    for n in srcs[0]:
        m = torch.stack([s[n] for s in srcs], 1)
        for i, row in enumerate(m.tolist()):
            where[tuple(row)] = (n, i)
    copies = {}
    for tn in outs[0]:
        m = torch.stack([o[tn] for o in outs], 1)
        copies[tn] = [where.get(tuple(r)) for r in m.tolist()]
    _, _, ref = one(seed)
    deps = {}
    for n in names:
        _, _, out = one(seed, change=n)
        deps[n] = {tn: (out[tn] != ref[tn]).nonzero().flatten().tolist() for tn in out}
        deps[n] = {tn: v for tn, v in deps[n].items() if v}
    return deps, copies


def oracle_kinds(fn):
    deps, copies = provenance(fn)
    kinds, used = {}, {}
    for n, by in deps.items():
        if not by:
            kinds[n] = "unneeded"
            continue
        pure = all(copies[tn][i] is not None and copies[tn][i][0] == n for tn, v in by.items() for i in v)
        kinds[n] = "direct" if pure else "fallback"
    for tn, row in copies.items():
        for src in row:
            if src is not None:
                used.setdefault(src[0], set()).add(src[1])
    return kinds, used


def box_bytes(shape, itemsize, boxes):
    idx = torch.arange(max(1, int(torch.tensor(shape).prod()) if shape else 1)).reshape(shape or ())
    out = set()
    for box in boxes:
        part = idx[tuple(slice(a, b) for a, b in box)]
        for e in part.reshape(-1).tolist():
            out.update(range(e * itemsize, (e + 1) * itemsize))
    return out


def check_labels(fn):
    bad = []
    case = fn()
    exp = case["expect"]
    if exp.get("plan") == "error" or exp.get("no_oracle"):
        return bad
    kinds, used = oracle_kinds(fn)
    overlap = set(exp.get("overlap", ()))
    for n, k in exp["names"].items():
        if k not in KINDS:
            bad.append(f"{n}: unknown kind {k}")
        got = kinds[n]
        ok = {
            "direct": got == "direct",
            "fallback": got == "fallback" or n in overlap or n in exp.get("value_read", ()),
            "either": got in ("direct", "fallback"),
            "unneeded": got == "unneeded",
            "group": got != "unneeded",
        }.get(k, False)
        if not ok:
            bad.append(f"{n}: label {k}, oracle {got}")
    missing = set(kinds) - set(exp["names"])
    if missing:
        bad.append(f"unlabelled: {sorted(missing)}")
    ck = dict(stream_of(case))
    for n, boxes in exp.get("boxes", {}).items():
        want = box_bytes(tuple(ck[n].shape), ck[n].element_size(), boxes)
        if want != used.get(n, set()):
            bad.append(f"{n}: boxes cover {len(want)} bytes, eager uses {len(used.get(n, set()))}")
    return bad


# ------------------------------------------------------------------ shim
class PlanError(RuntimeError):
    pass


class Product:
    """Adapter for the system under test."""

    def plan(self, targets, items, load, token=None):
        """items: (name, shape, dtype) declared.  Returns an opaque plan or raises."""
        raise NotImplementedError

    def kind(self, plan, name):
        """'direct' | 'fallback' | 'unneeded'"""
        raise NotImplementedError

    def boxes(self, plan, name):
        """boxes this rank reads of `name`, or None where the system does not say"""
        return None

    def need(self, plan, name, shape, itemsize):
        """bytes of `name` this rank reads, or None"""
        boxes = self.boxes(plan, name)
        return None if boxes is None else box_bytes(tuple(shape), itemsize, boxes)

    def update(self, plan, targets, chunks, load, token=None, required=()):
        """start_reload, then chunks (iterables of (name, tensor)), then finish_reload, which raises where a byte of
        a `required` target was written by nothing or a planned name did not arrive."""
        raise NotImplementedError

    def update_from_shards(self, plan, targets, shards, load, required=()):
        """the same from trainer shards: name -> [(rank, global box, tensor)]"""
        raise NotImplementedError

    def update_from_file(self, plan, targets, path, load, required=()):
        """the same from a safetensors file, reading only what the plan needs"""
        raise NotImplementedError


class EagerProduct(Product):
    """No plan at all: everything is a fallback.  Right on values wherever one load call is enough."""

    def plan(self, targets, items, load, token=None):
        return None

    def kind(self, plan, name):
        return "fallback"

    def update(self, plan, targets, chunks, load, token=None, required=()):
        load(targets, ((n, t) for c in chunks for n, t in c))


class Api:
    """What a probe gets.  `tracing(targets, items)` is a context in which `trace(name)` returns the trace tensor of
    a declared (name, shape, dtype); `kind(name)` and `reason(name)` answer after it."""

    device_type = "privateuseone"

    def tracing(self, targets, items):
        raise NotImplementedError

    def trace(self, name):
        raise NotImplementedError

    def kind(self, name):
        raise NotImplementedError

    def reason(self, name):
        raise NotImplementedError

    def register_again(self):
        """load / register the backend a second time in this process"""
        raise NotImplementedError


# ------------------------------------------------------------------ safetensors, the few lines needed here
ST = {
    torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.uint8: "U8", torch.int8: "I8",
    torch.int64: "I64", torch.int32: "I32", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
}  # fmt: skip
TS = {v: k for k, v in ST.items()}


def st_write(path, tensors):
    head, blobs, at = {}, [], 0
    for n, t in tensors.items():
        b = bytes_of(t).numpy().tobytes()
        head[n] = {"dtype": ST[t.dtype], "shape": list(t.shape), "data_offsets": [at, at + len(b)]}
        blobs.append(b)
        at += len(b)
    h = json.dumps(head).encode()
    tmp = path + ".new"
    with open(tmp, "wb") as f:
        f.write(struct.pack("<Q", len(h)) + h + b"".join(blobs))
    os.replace(tmp, path)


def st_header(path):
    with open(path, "rb") as f:
        (n,) = struct.unpack("<Q", f.read(8))
        head = json.loads(f.read(n))
    head.pop("__metadata__", None)
    return head, 8 + n


def st_read(path, base, e):
    a, b = e["data_offsets"]
    with open(path, "rb") as f:
        f.seek(base + a)
        data = bytearray(f.read(b - a))
    dt = TS[e["dtype"]]
    if not data:
        return torch.empty(e["shape"], dtype=dt)
    return torch.frombuffer(data, dtype=torch.uint8).clone().view(dt).reshape(e["shape"])


# ------------------------------------------------------------------ checker
def feed(items, reuse):
    """Yield items; with `reuse`, each tensor lives in one shared buffer that the next one overwrites."""
    if not reuse:
        yield from items
        return
    size = max([bytes_of(t).numel() for _, t in items] + [1])
    buf = torch.zeros(size + 16, dtype=torch.uint8)
    for n, t in items:
        b = bytes_of(t)
        buf.fill_(0xAB)
        buf[: b.numel()] = b
        yield n, (buf[: b.numel()].view(t.dtype).reshape(t.shape) if b.numel() else t.clone())
    buf.fill_(0xCD)


def run_case(fn, product):
    """Failures (strings) of `product` on one case."""
    bad = []
    case = fn()
    exp = case["expect"]
    keep = list(exp.get("keep", ()))
    required = case.get("required", [n for n in case["targets"] if n not in keep])
    token = case.get("token", lambda: None)
    extra = {"required": required}

    def says(e):
        words = exp.get("says")
        return not words or any(w in str(e) for w in words)

    def declared(c, order=None):
        return [(n, tuple(t.shape), t.dtype) for n, t in stream_of(c, order)]

    orders = case.get("orders") or [None]
    for order in orders:
        case, truth_case = fn(), fn()
        token = case.get("token", lambda: None)
        T = case["targets"]
        case.get("restore", nothing)(T)
        before = snapshot(T)
        ptrs = {n: t.data_ptr() for n, t in T.items()}
        objs = dict(T)
        try:
            plan = product.plan(T, declared(case, order), case["load"], token())
        except Exception as e:  # noqa: BLE001
            groups = [n for n, k in exp["names"].items() if k == "group"]
            if exp.get("plan") == "error" or exp.get("rebind"):
                if not says(e):
                    bad.append(f"plan error does not say {exp.get('says')}: {e}")
                if same(before, snapshot(T)):
                    bad.append("plan failed and left targets changed")
                continue
            if groups and any(g in str(e) for g in groups):
                continue
            bad.append(f"plan raised {type(e).__name__}: {e}")
            continue
        if exp.get("plan") == "error":
            bad.append("plan accepted what it must refuse")
            continue
        # kinds
        got = {n: product.kind(plan, n) for n in exp["names"]}
        groups = [n for n, k in exp["names"].items() if k == "group"]
        for n, k in exp["names"].items():
            ok = {
                "direct": got[n] == "direct",
                "fallback": got[n] == "fallback",
                "either": got[n] in ("direct", "fallback"),
                "unneeded": got[n] == "unneeded",
                "group": got[n] in ("direct", "fallback"),
            }[k]
            if exp.get("rebind"):
                ok = got[n] != "unneeded"
            if not ok and not isinstance(product, EagerProduct):
                bad.append(f"{n}: expected {k}, planned {got[n]}")
        if groups and len({got[n] for n in groups}) != 1:
            bad.append(f"group split: { {n: got[n] for n in groups} }")
        ck = dict(stream_of(case))
        for n, boxes in exp.get("boxes", {}).items():
            have = product.need(plan, n, ck[n].shape, ck[n].element_size())
            if have is None:
                continue
            want = box_bytes(tuple(ck[n].shape), ck[n].element_size(), boxes)
            if got[n] == "direct" and have != want:
                bad.append(f"{n}: reads {len(have)} bytes, needs {len(want)}")
        # values
        rounds = [(stream_of(case, order), case.get("arrive"))]
        for u in case.get("updates", ()):
            rounds.append((list(u.items()), None))
        for i, (items, arrive) in enumerate(rounds):
            if i and "between" in case:
                case["between"](T)
                truth_case["between"](truth_case["targets"])
            if i:
                case.get("restore", nothing)(T)
            sent = list((arrive or dict(items)).items()) if arrive else items
            incomplete = case.get("partial") is not None and i == len(rounds) - 1 and i > 0
            if incomplete:
                sent = [(n, t) for n, t in sent if n in case["partial"]]
            must_fail = exp.get("finish") == "error" and (incomplete or case.get("partial") is None)
            prior = snapshot(T)
            chunks = [sent]
            if case.get("buckets") and i == 0:
                d = dict(sent)
                chunks = [[(n, d[n]) for n in b] for b in case["buckets"]]
            if case.get("reuse_buffer"):
                flat = [x for c in chunks for x in c]
                lens, it = [len(c) for c in chunks], feed(flat, True)
                chunks = [(next(it) for _ in range(k)) for k in lens]
            try:
                product.update(plan, T, chunks, case["load"], token=token(), **extra)
            except Exception as e:  # noqa: BLE001
                if not must_fail:
                    if not (exp.get("rebind") and says(e)):
                        bad.append(f"update {i} raised {type(e).__name__}: {e}")
                elif not says(e):
                    bad.append(f"finish error does not say {exp.get('says')}: {e}")
                elif exp.get("no_partial_write") and same(prior, snapshot(T)):
                    bad.append("a refused update changed live bytes")
                break
            if must_fail:
                bad.append(f"update {i}: finish accepted an incomplete or wrong update")
                break
            case.get("process", nothing)(T)
            want = eager(truth_case, items)
            wrong = same(want, snapshot(T))
            if wrong:
                bad.append(f"update {i}{'' if order is None else f' order {order}'}: wrong bytes in {wrong}")
            moved = [n for n in objs if T.get(n) is not objs[n] or T[n].data_ptr() != ptrs[n]]
            if moved and not (exp.get("rebind") and isinstance(product, EagerProduct)):
                bad.append(f"storage moved: {moved}")
            for n in keep:
                if not torch.equal(before[n], bytes_of(T[n])):
                    bad.append(f"{n} must keep its bytes")
        # M x N
        if case.get("shards") and not isinstance(product, EagerProduct):
            c2, t2 = fn(), fn()
            want = eager(t2)
            plan = product.plan(c2["targets"], declared(c2), c2["load"], token())
            product.update_from_shards(plan, c2["targets"], c2["shards"], c2["load"], **extra)
            if same(want, snapshot(c2["targets"])):
                bad.append(f"from shards: wrong bytes in {same(want, snapshot(c2['targets']))}")
            for b in c2.get("bad_shards", ()):
                c3 = fn()
                p3 = product.plan(c3["targets"], declared(c3), c3["load"], token())
                prior = snapshot(c3["targets"])
                try:
                    product.update_from_shards(p3, c3["targets"], b, c3["load"], **extra)
                    bad.append("bad shards accepted")
                except Exception:  # noqa: BLE001
                    if same(prior, snapshot(c3["targets"])):
                        bad.append("bad shards: live bytes changed")
        if case.get("file") and not isinstance(product, EagerProduct):
            c2, t2 = fn(), fn()
            with tempfile.TemporaryDirectory() as d:
                path = os.path.join(d, "model.safetensors")
                plan = None
                for i, ck in enumerate([c2["checkpoint"], *c2.get("updates", ())]):
                    st_write(path, ck)
                    if plan is None:
                        plan = product.plan(c2["targets"], declared(c2), c2["load"], token())
                    elif "between" in c2:
                        c2["between"](c2["targets"])
                        t2["between"](t2["targets"])
                    product.update_from_file(plan, c2["targets"], path, c2["load"], **extra)
                    want = eager(t2, list(ck.items()))
                    if same(want, snapshot(c2["targets"])):
                        bad.append(f"from file, update {i}: wrong bytes in {same(want, snapshot(c2['targets']))}")
    return bad


def cases(mod):
    return {k: v for k, v in vars(mod).items() if k.startswith("case_") and callable(v)}


def probes(mod):
    return {k: v for k, v in vars(mod).items() if k.startswith("probe_") and callable(v)}


def check_eager(fn):
    case = fn()
    exp = case["expect"]
    for k in ("targets", "checkpoint", "load", "expect"):
        if k not in case:
            return [f"no {k}"]
    for order in case.get("orders") or [None]:
        c = fn()
        try:
            eager(c, stream_of(c, order))
        except Exception as e:  # noqa: BLE001
            if exp.get("plan") == "error":
                continue
            return [f"eager load raised {type(e).__name__}: {e}"]
        if exp.get("plan") == "error" and not exp.get("eager_ok"):
            return ["expected a plan error but the eager load runs"]
    return []


def main(which):
    import importlib

    failed = 0
    for k in which or "ab":
        try:
            mod = importlib.import_module(f"cases_{k}")
        except ImportError:
            continue
        for name, fn in cases(mod).items():
            for what, check in (("eager", check_eager), ("oracle", check_labels)):
                for line in check(fn):
                    failed += 1
                    print(f"{mod.__name__}.{name} [{what}] {line}")
        print(f"{mod.__name__}: {len(cases(mod))} cases, {len(probes(mod))} probes")
    print("FAILED" if failed else "OK", failed or "")
    return failed


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1] if len(sys.argv) > 1 else "") else 0)

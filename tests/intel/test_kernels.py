"""The kernels that Intel's Triton compiled, executed on the CPU, against the NumPy brute force."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest

from dash_portable.kernels.launch import turns
from tests.intel.opencl import Cpu, Module, modules_of, narrow, sparse, widen
from tests.intel.scene import EPS, Scene

FAR = 2**26  # elements from one cache block to the next; the cache then has more than 2**31


@lru_cache(maxsize=8)
def scene_of(dtype: str, kv_heads: int, group: int, dim: int, block_size: int) -> Scene:
    return Scene(dtype, kv_heads, group, dim, block_size)


def scene_for(module: Module, group: int | None = None) -> Scene:
    consts = module.consts
    group = consts.get("G", 1) if group is None else group
    return scene_of(module.dtype, consts["H"], group, consts["D"], consts["P"])


def kernels(name: str, constant: str = "D", only: str = "") -> pytest.MarkDecorator:
    """Every compiled launch row of a kernel, or of one case; two of a name differ by constants."""
    found = [
        stem for stem in modules_of(name, constant) if not only or stem.name.startswith(f"{only}.")
    ]
    return pytest.mark.parametrize("stem", found, ids=[stem.name for stem in found])


def dummies(module: Module, given: dict[str, object]) -> dict[str, object]:
    """Pointers that this form of the kernel does not read still need a value."""
    unread = [a for a, kind in module.args.items() if kind.startswith("*") and a not in given]
    return given | dict.fromkeys(unread, np.zeros(16, np.int64))


def strides(cache: np.ndarray) -> dict[str, int]:
    cb, ch, ct, _ = (stride // cache.itemsize for stride in cache.strides)
    return {"stride_cb": cb, "stride_ch": ch, "stride_ct": ct}


def store_arguments(
    scene: Scene, cache: np.ndarray, query: np.ndarray, index: np.ndarray
) -> dict[str, object]:
    n, dim, table = len(scene.rows), scene.rule.dim, scene.table()
    rows = {name: scene.inputs(name) for name in ("q", "k", "v", "iq", "ik")}
    widths = {f"stride_{name}n": array[0].size for name, array in rows.items()}
    return {
        **{f"{name}_ptr": array for name, array in rows.items()},
        **widths,
        **strides(cache),
        "query_ptr": query,
        "index_ptr": index,
        "cache_ptr": cache,
        "head_cls_ptr": narrow(scene.head_cls, scene.dtype),
        "turn_ptr": np.array(turns(scene.rule.theta, dim), np.int64),
        "row_pos_ptr": scene.row_pos(),
        "slots_ptr": scene.slots(),
        "roles_ptr": scene.roles(),
        "positions_ptr": np.zeros((4, n), np.int32),  # row 3 is 0: decoded tokens
        "table_ptr": table,
        "num_rows": n,
        "stride_table": table.shape[1],
        "stride_pages": 0,
    }


def rotated_rows(scene: Scene, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Room for what store returns: queries and index queries of the rows."""
    n, dim, heads = len(scene.rows), scene.rule.dim, scene.kv_heads * scene.group
    return np.zeros((n, heads, dim), dtype), np.zeros((n, dim), dtype)


def run_store(cpu: Cpu, module: Module, scene: Scene, cache: np.ndarray) -> tuple[np.ndarray, ...]:
    query, index = rotated_rows(scene, cache.dtype)
    n, parts = len(scene.rows), module.consts["PARTS"]
    given = store_arguments(scene, cache, query, index)
    given["coords_ptr"] = np.zeros((n, 4), np.int32)
    cpu.launch(module, ((parts + 1) * n,), **dummies(module, given))
    return query, index


def compare_stored(scene: Scene, cache: np.ndarray) -> None:
    """Bytes exact, numbers rounded once, blanks still blank."""
    found = widen(cache, scene.dtype)
    exact = widen(scene.cache(), scene.dtype)
    dim = scene.rule.dim
    octets = np.s_[:, -1, :, dim : dim + 30]
    np.testing.assert_array_equal(found[octets], exact[octets])
    assert np.array_equal(np.isnan(found), np.isnan(exact))
    gap = np.nanmax(np.abs(found - exact))
    # Neighbours of the rounded value, where float32 angles and sums fall on the other side.
    assert gap <= 2 * EPS[scene.dtype] * np.nanmax(np.abs(exact)) + 2**-19 * np.nanmax(
        np.abs(exact)
    )


@kernels("store_row_kernel")
def test_store_row(cpu: Cpu, stem: Path):
    module = cpu.load(stem)
    scene = scene_for(module)
    cache = scene.cache(without_last=True)
    query, index = run_store(cpu, module, scene, cache)
    compare_stored(scene, cache)
    for found, name in ((query, "query"), (index, "index_query")):
        exact = scene.of_rows(name)
        live = ~np.isnan(exact.reshape(len(exact), -1)[:, 0])
        gap = np.abs(widen(found, scene.dtype) - exact)[live].max()
        assert gap <= (2 * EPS[scene.dtype] + 2**-19) * np.abs(exact[live]).max()


def select_arguments(
    scene: Scene, consts: dict[str, object], ids: np.ndarray, bias: np.ndarray
) -> dict[str, object]:
    n, rule, tile = len(scene.rows), scene.rule, int(str(consts["TILE"]))
    blocks = -(-max(scene.lengths) // rule.block)
    assert blocks > tile  # so that one row has more than one tile, and its parts are merged
    scores = -(-blocks // tile) * tile
    return {
        "row_pos_ptr": scene.row_pos(),
        "score_ptr": np.full((n, scores), np.nan, np.float32),
        "group_ptr": np.zeros((n, scores // 16), np.int64),
        "ticket_ptr": np.zeros((n, 2), np.int32),
        "ids_ptr": ids,
        "bias_ptr": bias,
        "max_scores": scores,
        "floor": rule.floor,
        "inv_sigma": 1 / rule.sigma,
    }


def room(scene: Scene) -> tuple[np.ndarray, np.ndarray]:
    """ids and bias of the rows, unwritten."""
    shape = (len(scene.rows), scene.rule.topk)
    return np.full(shape, 77, np.int32), np.full(shape, np.nan, np.float32)


def run_merge(cpu: Cpu, module: Module, scene: Scene, shared: dict[str, object]) -> None:
    """The second launch, where rows of several tiles are not ended by the first."""
    if module.consts["TICKET"]:
        return
    (merging,) = (
        m for m in modules_of("select_merge_kernel", "TILE") if m.name.endswith(".generic")
    )
    merge = cpu.load(merging)
    assert merge.consts["TILE"] == module.consts["TILE"]
    cpu.launch(merge, (len(scene.rows),), **shared)


def compare_selected(scene: Scene, ids: np.ndarray, bias: np.ndarray, query: np.ndarray) -> None:
    """Against the brute force, by these index queries [N, D] as they are: what a relative error of
    2**-20 in the scores does, twice, is allowed, and no rounding to 16 bits is as small.
    """
    certain = 0
    for row, seq in enumerate(scene.rows):
        if seq is None:
            assert (ids[row] == -1).all()
            assert (bias[row] == 0).all()
            continue
        chosen = scene.selection(seq, query[row])
        kept = len(chosen.blocks)
        assert (ids[row, kept:] == -1).all()
        assert (bias[row, kept:] == 0).all()
        if chosen.margin < 1e-3:
            continue
        certain += 1
        assert ids[row, :kept].tolist() == chosen.blocks
        moved = scene.selection(seq, query[row], stretch=1 + 2**-20).bias
        gap = np.abs(np.subtract(bias[row, :kept], chosen.bias)).max(initial=0)
        largest = np.abs(chosen.bias).max(initial=0)
        allowed = 2 * np.abs(np.subtract(moved, chosen.bias)).max(initial=0)
        assert gap <= allowed + 2**-20 * largest
    assert certain >= 3


@kernels("select_decode_kernel")
def test_select_decode(cpu: Cpu, stem: Path):
    module = cpu.load(stem)
    scene, consts = scene_for(module), module.consts
    n, rule, cache, table = len(scene.rows), scene.rule, scene.cache(), scene.table()
    ids, bias = room(scene)
    shared = select_arguments(scene, consts, ids, bias)
    query = scene.of_rows("index_query")
    given = {
        **shared,
        **strides(cache),
        "iq_ptr": narrow(query, scene.dtype),
        "cache_ptr": cache,
        "turn_ptr": np.array(turns(rule.theta, rule.dim), np.int64),
        "roles_ptr": scene.roles(),
        "positions_ptr": np.zeros((4, n), np.int32),
        "table_ptr": table,
        "num_rows": n,
        "max_blocks": 0,
        "scale": rule.scale,
        "stride_iqn": rule.dim,
        "stride_table": table.shape[1],
        "stride_pages": 0,
    }
    cpu.launch(module, (consts["SPLIT"] * n,), **dummies(module, given))
    run_merge(cpu, module, scene, shared)
    compare_selected(scene, ids, bias, query)


@kernels("store_select_kernel")
def test_store_select(cpu: Cpu, stem: Path):
    """Both stages in one launch. Selection rotates its own index query, and rounds it as the one
    that is stored: Intel's Triton takes a rounding that is widened at once for nothing.
    """
    module = cpu.load(stem)
    scene, consts = scene_for(module), module.consts
    cache = scene.cache(without_last=True)
    query, index = rotated_rows(scene, cache.dtype)
    ids, bias = room(scene)
    shared = select_arguments(scene, consts, ids, bias)
    given = {**store_arguments(scene, cache, query, index), **shared, "scale": scene.rule.scale}
    programs = consts["SPLIT"] + consts["PARTS"] + 1
    cpu.launch(module, (programs * len(scene.rows),), **dummies(module, given))
    run_merge(cpu, module, scene, shared)
    compare_stored(scene, cache)
    compare_selected(scene, ids, bias, widen(index, scene.dtype))


def run_attend(
    cpu: Cpu, module: Module, scene: Scene, cache: np.ndarray, query: np.ndarray
) -> np.ndarray:
    n, rule, consts = len(scene.rows), scene.rule, module.consts
    heads, split, table = query.shape[1], module.consts["SPLIT"], scene.table()
    ids, bias = scene.selections()
    out = narrow(np.full(query.shape, np.nan), scene.dtype)
    total = np.full((n, heads, split, rule.dim), np.nan, np.float32)
    mass = np.full((n, heads, split, 2), np.nan, np.float32)
    given = {
        **strides(cache),
        "query_ptr": narrow(query, scene.dtype),
        "cache_ptr": cache,
        "row_pos_ptr": scene.row_pos(),
        "row_seq_ptr": np.arange(n, dtype=np.int32),
        "table_ptr": table,
        "ids_ptr": ids,
        "bias_ptr": bias,
        "out_ptr": out,
        "sum_ptr": total,
        "mass_ptr": mass,
        "ticket_ptr": np.zeros(n * consts["H"], np.int32),
        "stride_table": table.shape[1],
    }
    cpu.launch(module, (split * consts["H"] * n,), **dummies(module, given))
    if split == 1 or consts["TICKET"]:
        return widen(out, scene.dtype)
    return merged_splits(total, mass)


def one_softmax(values: np.ndarray, logit: np.ndarray, held: np.ndarray) -> np.ndarray:
    """Weigh values [N, Hq, S, D] by natural logits [N, Hq, S] of those that are held; zeros where
    none is.
    """
    logit = np.where(held, logit, -1e300)
    weight = np.where(held, np.exp(logit - logit.max(2, keepdims=True)), 0)
    whole = weight.sum(2)[..., None]
    merged = (np.where(held[..., None], values, 0) * weight[..., None]).sum(2)
    return merged / np.where(whole > 0, whole, 1.0)


def merged_splits(total: np.ndarray, mass: np.ndarray) -> np.ndarray:
    """Splits [N, Hq, SPLIT, D], not normalised, with (maximum in log2, mass) [N, Hq, SPLIT, 2]."""
    held = mass[..., 1] > 0
    size = np.where(held, mass[..., 1], 1.0).astype(np.float64)
    logit = np.where(held, mass[..., 0], 0) * np.log(2) + np.log(size)
    return one_softmax(np.where(held[..., None], total, 0) / size[..., None], logit, held)


@kernels("attend_decode_kernel")
def test_attend_decode(cpu: Cpu, stem: Path):
    module = cpu.load(stem)
    scene = scene_for(module)
    query = scene.of_rows("query")
    exact = scene.attended(query, *scene.selections())
    found = run_attend(cpu, module, scene, scene.cache(), query)
    keys = scene.rule.local + scene.rule.topk * scene.rule.block
    assert np.abs(found - exact).max() <= scene.allowed(exact, keys)


@kernels("attend_merge_kernel", "SPLIT")
def test_attend_merge(cpu: Cpu, stem: Path):
    """Splits without any key among them, and a row that has none at all."""
    module = cpu.load(stem)
    heads, dim, split = (module.consts[name] for name in ("HQ", "D", "SPLIT"))
    random = np.random.default_rng(0)
    total = random.standard_normal((3, heads, split, dim)).astype(np.float32)
    mass = random.random((3, heads, split, 2)).astype(np.float32) + 1
    mass[1, :, ::2] = (-np.inf, 0)
    mass[2] = (-np.inf, 0)
    out = narrow(np.full((3, heads, dim), np.nan), module.dtype)
    cpu.launch(module, (3 * heads,), sum_ptr=total, mass_ptr=mass, out_ptr=out)
    exact = merged_splits(total, mass)
    assert (exact[2] == 0).all()
    largest = np.abs(exact).max()
    gap = np.abs(widen(out, module.dtype) - exact).max()
    assert gap <= 2 * largest * (EPS[module.dtype] + split * EPS["fp32"])


@kernels("merge_segments_kernel")
def test_merge_segments(cpu: Cpu, stem: Path):
    module = cpu.load(stem)
    heads, dim, segments = (module.consts[name] for name in ("HQ", "D", "SEGMENTS"))
    random = np.random.default_rng(1)
    out = narrow(random.standard_normal((3, segments, heads, dim)), module.dtype)
    # Every stride a multiple of 16, as the compiled module was told.
    lse = np.zeros((3, segments, heads * 16), np.float32)[..., ::16]
    lse[...] = random.standard_normal(lse.shape)
    bias = random.standard_normal((3, segments - 1)).astype(np.float32)
    used = np.ones((3, segments), np.int32)
    used[1, 3:7], used[2] = 0, 0
    lse[used == 0] = np.inf  # an empty segment may hold anything
    out[1, 3:7] = narrow(np.nan, module.dtype)
    merged = narrow(np.full((3, heads, dim), np.nan), module.dtype)
    given = {
        "out_ptr": out,
        "lse_ptr": lse,
        "used_ptr": used,
        "bias_ptr": bias,
        "merged_ptr": merged,
    }
    for name, array in (("o", out), ("l", lse)):
        for axis, step in zip("nsh", array.strides, strict=False):
            given[f"stride_{name}{axis}"] = step // array.itemsize
    cpu.launch(module, (3 * heads,), **given)
    held = np.broadcast_to((used > 0)[:, None], (3, heads, segments))
    logit = np.where(held, lse.swapaxes(1, 2), 0).astype(np.float64)
    logit += np.pad(bias, ((0, 0), (0, 1)))[:, None]
    exact = one_softmax(widen(out, module.dtype).swapaxes(1, 2), logit, held)
    assert (exact[2] == 0).all()
    largest = np.abs(exact).max()
    gap = np.abs(widen(merged, module.dtype) - exact).max()
    assert gap <= 2 * largest * (EPS[module.dtype] + segments * EPS["fp32"])


@kernels("gather_segments_kernel")
def test_gather_segments(cpu: Cpu, stem: Path):
    module = cpu.load(stem)
    scene, consts = scene_for(module), module.consts
    n, rule, cache, table = len(scene.rows), scene.rule, scene.cache(), scene.table()
    pieces = rule.topk + rule.local_blocks
    ids, bias = scene.selections()
    width, copies = consts["WIDE"], 1 if consts["TAIL"] else rule.topk + 1
    heads = scene.kv_heads * consts["G"]
    query = narrow(np.random.default_rng(4).standard_normal((n, heads, rule.dim)), scene.dtype)
    wide = narrow(np.full((n, copies, heads, width), np.nan), scene.dtype)
    key = narrow(np.full((n * pieces * rule.block, scene.kv_heads, width), np.nan), scene.dtype)
    value = narrow(np.full((*key.shape[:2], rule.dim), np.nan), scene.dtype)
    used = np.full((n, rule.topk + 1), 77, np.int32)
    given = {
        **strides(cache),
        "cache_ptr": cache,
        "row_pos_ptr": scene.row_pos(),
        "row_seq_ptr": np.arange(n, dtype=np.int32),
        "table_ptr": table,
        "ids_ptr": ids,
        "bias_ptr": bias,
        "query_ptr": query,
        "key_ptr": key,
        "value_ptr": value,
        "wide_ptr": wide,
        "used_ptr": used,
        "length_ptr": np.zeros_like(used),
        "stride_table": table.shape[1],
        "stride_kt": scene.kv_heads * width // 8,
        "stride_kh": width // 8,
        "stride_vt": scene.kv_heads * rule.dim // 8,
        "stride_vh": rule.dim // 8,
    }
    cpu.launch(module, (n * (pieces + 1) * consts["PARTS"],), **given)
    live = np.array([seq is not None for seq in scene.rows])
    np.testing.assert_array_equal(
        widen(wide, scene.dtype)[..., : rule.dim],
        np.broadcast_to(
            np.where(live[:, None, None], widen(query, scene.dtype), 0)[:, None],
            (n, copies, heads, rule.dim),
        ),
    )
    keys = widen(key, scene.dtype).reshape(n, pieces * rule.block, scene.kv_heads, width)
    values = widen(value, scene.dtype).reshape(n, pieces * rule.block, scene.kv_heads, rule.dim)
    for row, seq in enumerate(scene.rows):
        segments = [[]] * (rule.topk + 1) if seq is None else scene.tokens(seq, ids[row].tolist())
        if not consts["TAIL"]:
            assert used[row].tolist() == [len(tokens) for tokens in segments]
        blank = np.ones(pieces * rule.block, bool)
        for segment, tokens in enumerate(segments):
            at = np.arange(len(tokens)) + segment * rule.block
            blank[at] = False
            if seq is None or not tokens:
                continue
            np.testing.assert_array_equal(
                keys[row, at, :, : rule.dim], scene.facts[seq]["keys"][tokens]
            )
            np.testing.assert_array_equal(values[row, at], scene.facts[seq]["values"][tokens])
            if consts["TAIL"]:
                extra = float(bias[row, segment]) if segment < rule.topk else 0.0
                wanted = extra * rule.dim**0.5
                said = keys[row, at, :, rule.dim : rule.dim + 2].sum(-1)
                assert np.abs(said - wanted).max() <= 2 * EPS[scene.dtype] ** 2 * abs(wanted) + 1e-6
        assert (keys[row, blank, :, : rule.dim] == 0).all()
        assert (values[row, blank] == 0).all()


def far_cache(scene: Scene, without_last: bool = False) -> np.ndarray:
    """The scene's cache with its cache blocks FAR elements apart: more than 2**31 in all."""
    near = scene.cache(without_last)
    assert scene.num_blocks * FAR > 2**31
    flat = sparse((scene.num_blocks * FAR,), near.dtype)
    steps = (FAR * near.itemsize, *near.strides[1:])
    far: np.ndarray = np.ndarray(near.shape, near.dtype, buffer=flat, strides=steps)
    far[...] = near
    return far


@kernels("store_row_kernel", only="store_row_bf16")
def test_store_beyond_32_bits(cpu: Cpu, stem: Path):
    module = cpu.load(stem)
    scene = scene_for(module)
    cache = far_cache(scene, without_last=True)
    run_store(cpu, module, scene, cache)
    compare_stored(scene, cache)


@kernels("attend_decode_kernel", only="attend_decode_bf16")
def test_attend_beyond_32_bits(cpu: Cpu, stem: Path):
    module = cpu.load(stem)
    scene = scene_for(module)
    query = scene.of_rows("query")
    exact = scene.attended(query, *scene.selections())
    found = run_attend(cpu, module, scene, far_cache(scene), query)
    keys = scene.rule.local + scene.rule.topk * scene.rule.block
    assert np.abs(found - exact).max() <= scene.allowed(exact, keys)

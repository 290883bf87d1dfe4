"""Sweeps on the GPU: python .gpu/one.py OUT [worker N]"""
import json, os, statistics, subprocess, sys, time
from pathlib import Path
sys.path.insert(0, str(Path.cwd() / "src")); sys.path.insert(0, str(Path.cwd()))
import torch, triton
import dilated_attention as da
from dilated_attention.backends.triton import dispatch
from dilated_attention.backends.triton.cache import CACHE
from dilated_attention.backends.triton.dispatch import TileConfig as T
from dilated_attention.bench import machine, probes
from dilated_attention import testing
BF = torch.bfloat16
def med(f, rep=120): return triton.testing.do_bench(f, warmup=25, rep=rep, return_mode="median")
SWEEP = {  # name: pattern, n, heads, dim, causal, kernel -> tiles
  "blocks": (lambda: da.Pattern([da.Blocks.random(128, 127, 0, num_tokens=131072)]), 131072, 4, 128, False),
  "w4096": (lambda: da.Pattern([da.Window(4095)]), 131072, 16, 128, True),
}
TILES = {
  "forward": [(128,128,8,2),(128,128,8,3),(128,64,8,3),(128,64,4,2),(64,64,4,3),(64,64,4,2),(128,64,8,2,128),(64,128,4,2),(128,32,4,3),(64,128,8,2)],
  "dq": [(64,64,4,2),(64,64,4,3),(128,64,8,3),(128,64,8,2),(64,64,8,2),(64,32,4,2),(64,128,8,2)],
  "dkdv": [(32,64,4,3),(64,64,4,2),(64,64,8,3),(64,128,8,3),(64,128,8,2),(32,128,8,3),(32,64,4,4),(64,128,8,4)],
}
real = dispatch.config
def force(kernel, tile):
    dispatch.config = lambda k, *rest: T(*tile) if k == kernel else real(k, *rest)
    CACHE.kept.clear()
def tensors(n, heads, dim, seed=0):
    g = torch.Generator("cuda").manual_seed(seed)
    return [torch.randn(1, n, heads, dim, device="cuda", dtype=BF, generator=g) for _ in range(4)]
def calls(name):
    make, n, heads, dim, causal = SWEEP[name]
    pattern = make()
    q, k, v, dout = tensors(n, heads, dim)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    def attend(q, k, v): return da.dilated_attention(q, k, v, pattern, is_causal=causal, backend="triton")
    def forward():
        with torch.no_grad(): return attend(q, k, v)
    out = attend(*leaves)
    def backward(): return torch.autograd.grad(out, leaves, dout, retain_graph=True)
    return forward, backward
def jobs(): return [(name, kernel, tile) for name in SWEEP for kernel in TILES for tile in TILES[kernel]]
def worker(number, count):
    made = {}
    for at, (name, kernel, tile) in enumerate(jobs()):
        if at % count != number: continue
        try:
            if name not in made: made = {name: calls(name)}
            force(kernel, tile)
            made[name][kernel != "forward"]()
            torch.cuda.synchronize()
        except Exception as e: print(name, kernel, tile, type(e).__name__, str(e)[:100], flush=True)
def kernel_ms(f, name, repeats=5):
    f(); found = []
    for _ in range(repeats):
        found.append(sum(ms for kernel, _, ms in probes.kernel_times(f, torch.device("cuda")) if kernel.startswith(name)))
    return statistics.median(found)
def decode(out):
    heads, dim, n = 12, 64, 65536
    g = torch.Generator("cuda").manual_seed(1)
    q, k, v = (torch.randn(1, n, heads, dim, device="cuda", dtype=BF, generator=g) for _ in range(3))
    cases = {"longnet": da.DilatedPattern.longnet([2048,4096,8192,16384,32768],[1,2,4,8,16]),
             "window 1024 + prefix 4": da.Pattern([da.Window(1023), da.Prefix(4)]),
             "window 4096 + prefix 4": da.Pattern([da.Window(4095), da.Prefix(4)]),
             "window + longnet": da.Pattern([da.Window(1023)] + [da.Dilated(w, r) for w, r in zip((4096,8192,16384,32768),(2,4,8,16))])}
    for name, pattern in cases.items():
        for at in (65535, 40000):
            f = lambda: da.dilated_attention(q[:, :1], k[:, :at+1], v[:, :at+1], pattern, is_causal=True, query_offset=at)
            assert da.explain(q[:, :1], k[:, :at+1], v[:, :at+1], pattern, is_causal=True, query_offset=at).backend == "triton"
            got = f()
            for head in (0, 5):
                keys = torch.tensor(pattern.keys(at, head, num_tokens=n, num_heads=heads, is_causal=True), device="cuda")
                w = torch.softmax(k[0, keys, head].double() @ q[0, 0, head].double() / dim**0.5, 0)
                exact = w @ v[0, keys, head].double()
                off = ((got[0, 0, head].double() - exact).norm() / exact.norm()).item()
                assert off < 1e-2, (name, at, off)
            for _ in range(3): f()
            found = []
            for _ in range(15): found.append(sum(ms for _, _, ms in probes.kernel_times(f, torch.device("cuda"))) * 1e3)
            out[f"{name} at {at}"] = [min(found), statistics.median(found)]
            print("decode us", name, at, out[f"{name} at {at}"], flush=True)
def main():
    out = Path(sys.argv[1]); result = {"machine": machine.describe(torch.device("cuda"), os.environ.get("COMMIT"))}
    result["decode_us"] = {}; decode(result["decode_us"])
    t = time.time()
    workers = [subprocess.Popen([sys.executable, __file__, "worker", str(i), "10"]) for i in range(10)]
    [w.wait() for w in workers]; print("compiled in", time.time() - t, flush=True)
    result["sweep"] = {}
    for name in SWEEP:
        forward, backward = calls(name)
        reference = None
        for kernel in TILES:
            for tile in TILES[kernel]:
                if time.time() - t > 200: print("late"); break
                try:
                    force(kernel, tile)
                    f = forward if kernel == "forward" else backward
                    got = f()
                    got = [got] if kernel == "forward" else ([got[0]] if kernel == "dq" else list(got[1:]))
                    if tile == TILES[kernel][0]: reference = [x.float() for x in got]
                    off = max(((x.float() - y).norm() / y.norm()).item() for x, y in zip(got, reference))
                    del got
                    ms = kernel_ms(f, kernel)
                    result["sweep"][f"{name} {kernel} {tile}"] = [ms, off]
                    print(name, kernel, tile, round(ms, 3), f"{off:.1e}", flush=True)
                except Exception as e: print(name, kernel, tile, type(e).__name__, str(e)[:100], flush=True)
        del forward, backward, reference
    (out / "one.json").write_text(json.dumps(result, indent=1))
if len(sys.argv) > 2: worker(int(sys.argv[2]), int(sys.argv[3])) if sys.argv[1] == "worker" else None
else: main()

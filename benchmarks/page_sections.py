"""The sections of docs/benchmarks.md and benchmarks_h100.md: text, and which kept results fill it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks import page_tables as tables


@dataclass(frozen=True)
class Section:
    """A part of the page, which stands there when its results were kept.

    Attributes:
        results: names of the results; the first one's versions are shown.
        text: with fields in braces.
        fields: gets the records, returns what the text names; ``versions`` and figures are there anyway.
        more: names of further results, whose records follow where they were kept.
    """

    results: tuple[str, ...]
    text: str
    fields: Callable[..., dict[str, str]]
    more: tuple[str, ...] = ()


SECTIONS = (
    Section(
        ("prefill",),
        """\
## Prefill and training

{versions}

`python -m benchmarks.prefill`: TFLOP/s in bfloat16, head_dim_qk 192, head_dim_v 128. A forward counts as
2 B H S^2 x 320 operations and a backward as 2 B H S^2 x 832, half of that under a causal mask.

{way}

{prefill}

The same as ratios, our speed over that of another library. The backward's is over
{fastest}.

{shares}
""",
        lambda record: {
            "prefill": tables.prefill(record),
            "way": tables.way_of_prefill(record),
            "fastest": tables.fastest_backward(record),
            "shares": tables.shares(record),
        },
    ),
    Section(
        ("decode",),
        """\
## Decode kernels

{versions}

`python -m benchmarks.decode`: milliseconds of a call in a CUDA graph of a step's layers, over a paged compressed
cache (kv_lora_rank 512, rope 64) in bfloat16. `ragged` lengths are log-normal with sigma 0.6, `one_long` is one
sequence of 32k among shorter ones, and `thundermla` is the call that ThunderMLA's authors report. Every library uses
its own scheduler; the time of scheduling once per step is included. "host us" is the host time of our call outside of
a graph.

{decode}

{decode_not_captured}The host of this run took {add_us} us for PyTorch's own `x.add_(1)`.
""",
        lambda record: {
            "decode": tables.decode(record),
            "decode_not_captured": tables.not_captured(record),
            "add_us": f"{record['add_us']:.1f}",
        },
    ),
    Section(
        ("decode_invariant",),
        """\
## Decode with the same bits whatever the batch

{versions}

`python -m benchmarks.decode_invariant`: the time with `batch_invariant=True` divided by the time without it, on
backend `triton` in bfloat16, with pages of 64, log-normal lengths (for one sequence uniform) and one query token. A
column is the size of a sequence's first chunks in keys (`MLA_PLUGIN_BATCH_INVARIANT_CHUNK`; up to commit 915da3f983
of all its chunks), a row the geometric mean over its head counts. Small chunks keep a small batch parallel; large
chunks cost less per key. A column for FlashAttention 3 is how many times as long as ours it takes with one split for
every sequence, as vLLM calls it for bits that do not depend on the batch.

{invariant}
""",
        lambda record: {"invariant": tables.invariant(record)},
    ),
    Section(
        ("decode_quantised",),
        """\
## Decode over quantised caches

{versions}

`python -m benchmarks.decode_quantised`: microseconds of `mla_plugin.decode` by backend `triton` over a bfloat16 cache
and over quantised ones, with bfloat16 queries, from CUDA graphs; in brackets how many times as fast as over bfloat16.
Ragged lengths are log-normal.

{quantised}
""",
        lambda record: {"quantised": tables.quantised(record)},
    ),
    Section(
        ("prefill_backends",),
        """\
## Attention backends and the resolver's choice

{versions}

`python -m benchmarks.prefill_backends`: milliseconds of each backend's forward and backward in bfloat16, from CUDA
graphs, so without time on the host. The resolver's choice is in bold; forward and backward are chosen separately.
Packed lengths are log-normal.

{training_figure}

{packed_figure}

{choices}
""",
        lambda record: {"choices": tables.choices(record)},
    ),
    Section(
        ("absorbed_prefill",),
        """\
## Prefill with absorbed weights

{versions}

`python -m benchmarks.absorbed_prefill`: TFLOP/s of a forward in bfloat16, head_dim_qk 576, head_dim_v 512, H heads over
one KV head, B packed sequences of S tokens in the mean. `v in k`: `mla_plugin.attention` with v = k[..., :512], by the
Hopper kernel; `v elsewhere`: with a copy of v, by the plain kernels. `decode by ..`: `mla_plugin.decode` with all
queries at once.

{absorbed}
""",
        lambda record: {"absorbed": tables.absorbed(record)},
    ),
    Section(
        ("prefill_limits",),
        """\
## What tiles and short calls cost

{versions}

`python -m benchmarks.prefill_limits`: microseconds of one SM for each tile of 128 keys that a tile of 128 queries
meets, and what is fixed for a tile of queries, fitted to the times of 16 heads of 16,384 tokens with windows of 128 to
4,096; the residual is the largest deviation. The backward's kernels are fitted together.

{tile_costs}

Microseconds of short causal calls: from CUDA graphs, and of each kernel as the profiler sees it, the GPU otherwise
idle. Those of `triton` are delta, then dK and dV, then dQ, and the last two overlap (not at 64/64).

{short_calls}
""",
        lambda record: {"tile_costs": tables.tile_costs(record), "short_calls": tables.short_calls(record)},
    ),
    Section(
        ("dispatch",),
        """\
## Time on the host

{versions}

`python -m benchmarks.dispatch`: microseconds until a call returns, [1, 512, 16, 192/128] in bfloat16, causal, with
the GPU idle; without gradients, and with q, k and v that require them. A row with a backend's name is
`mla_plugin.attention` on that backend.

{dispatch}

Of that, everything up to a backend that does nothing takes {entry_us} us.
""",
        lambda record: {"dispatch": tables.dispatch(record), "entry_us": f"{record['layers']['all of it']:.0f}"},
    ),
    Section(
        ("context_parallel_x2",),
        """\
## Context parallelism

{versions}

`torchrun --nproc-per-node N -m benchmarks.context_parallel`: batch 1, causal, 192/128, over NVLink. Times are those
of the slowest rank, divided by the ideal: one GPU's time over the number of ranks. Memory is the peak of forward and
backward in GiB.

{context_parallel_figure}

{cp}

Use `all_gather` for windows.
""",
        lambda *records: {"cp": tables.context_parallel(*records)},
        more=("context_parallel_x4",),
    ),
    Section(
        ("latent_attention_x2",),
        """## Latents over several GPUs

{versions}

`torchrun --nproc-per-node 2 -m benchmarks.latent_attention`: the same for `latent_attention`, with the expansion. The
ideal is one GPU's attention on K and V that are already expanded.

{latent}
""",
        lambda record: {"latent": tables.latents(record)},
    ),
    Section(
        ("first_call",),
        """\
## First calls

{versions}

`python -m benchmarks.first_call`: seconds of a new shape's first call with an empty Triton cache, which is mostly
compile time, on a host that took {first_add_us} us for `x.add_(1)`. In a new process Triton has to start too, and the
first `torch.autograd.grad` imports sympy.

{first}
""",
        lambda record: {"first": tables.first_calls(record), "first_add_us": f"{record['add_us']:.1f}"},
    ),
    Section(
        ("warm_call",),
        """\
## The first call after a warm-up

{versions}

`python -m benchmarks.warm_call`: milliseconds in new processes after `mla-plugin warm-up`, medians of three: 4,096
tokens of 16 heads, decode of 8 such sequences. *Without the note*: the compiled kernels are there, but not what warm-up
notes beside them, which is loaded when CUDA starts. *PyTorch*: its own `scaled_dot_product_attention`.

{warm}
""",
        lambda record: {"warm": tables.warm_calls(record)},
    ),
    Section(
        ("decode_preference",),
        """\
## Decode backends and the resolver's choice

{versions}

`python -m benchmarks.decode_backends`: milliseconds of `mla_plugin.decode` on each backend, the fastest in bold. The
resolver's table is made from this run (`{file}`), so the resolver chooses the fastest for
every one of these calls. That was not checked in a second run.

{decode_figure}

{decode_128_heads_figure}

{backends}
""",
        lambda record: {
            "backends": tables.backends(record),
            "file": f"decode_preference_{record['gpu'].replace(' ', '_')}.json",
        },
    ),
    Section(
        ("transformers_decode",),
        """\
## Decoding in Hugging Face transformers

{versions}

`python -m benchmarks.transformers_decode`: tokens per second of `generate` with {layers} layers of DeepSeek-V3's
attention, of all sequences together, and the peak memory that `generate` adds. An empty cell ran out of memory. "First
time" is the first run of a process over these lengths, kernels loaded on the way included: a growing cache has a new
length in every step, for which cuDNN, which "sdpa" runs on, plans anew. The figure is of one sequence and a growing
cache, over lengths that were run before.

{transformers_figure}

{transformers}
""",
        lambda record: {
            "transformers": tables.transformers(record),
            "layers": record["model"]["num_hidden_layers"],
        },
    ),
    Section(
        ("vllm_engine",),
        """\
## vLLM's engine

{versions}

`python -m benchmarks.vllm_engine`: tokens per second, and in brackets the milliseconds of an engine step and of the
CUDA graph that it replays. The model has DeepSeek-V2-Lite's shape with {layers} layers and {kind}, and random
weights. The backends are vLLM's own and `{ours}`, this library. Requests decode over a cache of random latents.

{vllm_figure}

{decode}

{quantised}Milliseconds until the first token of one prompt; where vLLM did not choose the backend for prefill, its name
follows a `/`:

{prefill}

Steps of {queries} query tokens per request, as in speculative decoding. With random weights hardly a draft is
accepted, and the search for n-grams takes host time; compare the times of the graphs. `no graph`: some request had
fewer drafts than others, so vLLM computed these steps as prefills. An empty cell was not measured:

{drafted}

Greedy decoding of five prompts of 5 to 8000 tokens with random weights: how many of 48 tokens are equal before the
first that differs. After that the contexts differ too. Any two backends differ to this extent:

{agreement}
""",
        lambda record: {**tables.engines(record), "ours": tables.vllm_engine.OURS},
    ),
    Section(
        ("transformer_engine",),
        """\
## Training in TransformerEngine

{versions}

`python -m benchmarks.transformer_engine_training`: milliseconds of a training step inside TransformerEngine's CUDA
build, and the peak of memory, by TransformerEngine only and with `NVTE_MLA_TRITON=1` (`packed`:
`MLA_PLUGIN_TE=fill`). docs/hosts/transformer_engine.md says which kernels TransformerEngine ran.

{steps}
""",
        lambda record: {"steps": tables.training_steps(record)},
    ),
    Section(
        ("flash_padding",),
        """\
## FlashAttention 2 with V padded

{versions}

`python -m benchmarks.flash_padding`: milliseconds of causal calls: the backend `fa2` as a whole, its copies that
pad and trim, and our Triton kernels.

{padding}
""",
        lambda record: {"padding": tables.padding(record)},
    ),
)

"""An interpreter for the Gluon kernels, so that tests run them without a GPU.

``launching.py`` runs a kernel's launch; ``translate.py`` turns its functions into Python that works on ``values.py``
and ``memory.py``; ``schedule.py`` runs the partitions of warps, one at a time, and what they wait for; ``ptx.py`` runs
inline assembly.

What it finds, besides wrong results (``test_gluon_interpreter.py``):

- partitions that wait for each other, in random orders and with one as far ahead of the others as barriers allow;
- too many arrivals in a phase; bytes that are expected and not copied, or the reverse; products in flight at the end;
- shared memory that is read before its copy has landed or that nobody wrote: NaN;
- a product's result that is read, and operands that are overwritten, before it has been waited for;
- a product over what threads wrote or copied, or a TMA copy over it, without ``fence_async_shared`` since;
- copies by threads that nobody waits for, which end as late as they may;
- addresses outside of a tensor, and not aligned to the element;
- in a launch with launch_pdl, loads, stores and TMA copies before ``gdc_wait``, and an end without it.

What it cannot find: a missing ``synchronize`` between the threads of a warpgroup, which are one here; layouts and
swizzles that do not fit together; atomic additions and copies by threads before ``gdc_wait``, and whether a kernel
that overlaps the one before it (``launching.py``) reads what that one writes; registers and time.
"""

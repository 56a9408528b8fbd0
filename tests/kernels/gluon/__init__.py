"""An interpreter for the Gluon kernels, so that tests run them without a GPU.

``launching.py`` runs a kernel's launch; ``translate.py`` turns its functions into Python that works on ``values.py``
and ``memory.py``; ``schedule.py`` runs the partitions of warps, one at a time, and what they wait for.

What it finds, besides wrong results (``test_gluon_interpreter.py``):

- partitions that wait for each other, in random orders and with one as far ahead of the others as barriers allow;
- too many arrivals in a phase; bytes that are expected and not copied, or the reverse; products in flight at the end;
- shared memory that is read before its copy has landed or that nobody wrote: NaN;
- a product's result that is read, and operands that are overwritten, before it has been waited for;
- a product over what threads wrote or copied without ``fence_async_shared`` since;
- copies by threads that nobody waits for, which end as late as they may;
- addresses outside of a tensor, and not aligned to the element.

What it cannot find: a missing ``synchronize`` between the threads of a warpgroup, which are one here; layouts and
swizzles that do not fit together; a kernel that reads before ``gdc_wait``; registers and time.
"""

"""Targets: what a chip's own compiler says of a program, with no such chip in the machine.

    from rematplan.target import compiler
    from rematplan.target.target import resolve

    target = resolve("tpu-v5e")
    program = compiler.lower(step, leaves, target=target)
    measured = compiler.measure(program, target=target, limit_bytes=600 << 20)
    measured.fits_limit, measured.required_bytes, measured.cycles

`chips` holds data-sheet facts, `target` names, `compiler` the one door to compilers (`workers`, `child`, `backends` and
`tpu` stand behind it, `cache` before it); `hlo`, `timeline`, `flops`, `work`, `fingerprint` and `cost` read what
compilers write; `cycles` predicts from it; `local` runs.
"""

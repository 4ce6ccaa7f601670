"""Planning on plain data: blocks of a program, what each can save, the choice over the whole chain. Knows no JAX."""

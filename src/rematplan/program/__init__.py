"""Programs: from a function to plain data and back. Knows no budgets, solvers or compilers."""

"""One record, several renderings: terminal text, JSON, HTML. Knows neither JAX nor how a plan is found."""

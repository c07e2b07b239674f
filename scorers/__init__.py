"""Scorers: one a file. Each rates the candidates of a request from 0 (worst) to 1 (best)."""

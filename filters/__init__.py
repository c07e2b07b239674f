"""Filters: one a file. Each says which candidates of a request may stay."""

"""Who is in the pool: static lists, files, DNS."""

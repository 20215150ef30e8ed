"""How ranks that are processes reduce a buffer: one file an algorithm, chosen by size and by where ranks are."""

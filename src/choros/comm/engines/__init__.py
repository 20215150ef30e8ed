"""Communication engines, one per file, imported only when selected."""

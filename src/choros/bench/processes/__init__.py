"""The programs of the bench processes, one module for each implementation; ``choros bench`` starts them."""

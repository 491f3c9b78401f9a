"""Model families as declarations."""

"""How rows on a card get to the other ranks."""

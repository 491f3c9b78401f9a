"""homeserve inside of other systems. Nothing of the product imports these."""

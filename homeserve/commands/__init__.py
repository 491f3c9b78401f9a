"""The commands of `homeserve`, one module each; `homeserve.cli` imports the one that is asked for."""

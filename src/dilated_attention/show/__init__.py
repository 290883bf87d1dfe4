"""Pictures of a pattern: `view` counts what there is to see, `terminal` prints it, `vega` draws and saves it."""

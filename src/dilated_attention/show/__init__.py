"""Pictures of a pattern: `view` counts what there is to see, `terminal` prints it, `chart` draws and saves it."""

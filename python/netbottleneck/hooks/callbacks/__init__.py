"""Framework callbacks and the measured run that they share: the modules behind netbottleneck.callbacks."""

"""From logits to tokens: processors, draws and stop strings of many calls' rows at once."""

"""What programs reach of PopART, and XLA has no use for: options, handles, module paths."""

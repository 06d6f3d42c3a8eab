"""Exchange gradients while backward is still computing others."""

"""Which loss scales a training can use, from what each scale does to its gradients."""

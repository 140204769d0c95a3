"""Other algorithms than the exact step, which send less: LocalSGD, DiLoCo, PowerSGD, top-k (a recipe's `communication`)."""

"""The noise of a step's gradient (--noise_scale_steps), and a batch that grows with it (`batch_schedule` noise)."""

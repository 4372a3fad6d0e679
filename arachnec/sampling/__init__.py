"""One request's way from noise to latents: scheduler, guidance, switch. What a forward is, is passed in."""

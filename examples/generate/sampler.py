"""The demo's pair as it is sampled: trained weights, the demo's own text encoder and decoder."""

from codec import TEXT, Decoder, text_encoder

from arachnec.models.diffusers.sampler import wan_sampler

sampler = wan_sampler(large="generate-output/large", small="generate-output/small", text_length=TEXT)
models, scheduler, start, arguments = sampler.models, sampler.scheduler, sampler.start, sampler.arguments
decoder = Decoder


def encoders():
    return {"text": text_encoder()}

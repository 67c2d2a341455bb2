"""What people ask about most; training spends its tokens there.

A small model learns a fact only after it has met it dozens of times, so even weights over all 8 800
documented objects teach none of them.
"""

MODULES: tuple[str, ...] = tuple(
    """functions stdtypes exceptions constants os os.path sys re json pathlib shutil subprocess datetime
    time collections itertools functools random math statistics string textwrap logging argparse csv
    sqlite3 threading queue concurrent.futures asyncio-task socket urllib.request urllib.parse tempfile
    glob fnmatch hashlib base64 secrets uuid copy pickle enum dataclasses typing contextlib abc inspect io
    operator heapq bisect decimal fractions struct zipfile tarfile gzip pprint traceback warnings calendar
    getpass platform shlex configparser timeit types html difflib unittest multiprocessing signal
    collections.abc atexit cmath zlib xml.etree.elementtree keyword linecache weakref""".split()
)
"""Pages of the library reference whose objects are all learnt."""

METHODS_OF: tuple[str, ...] = tuple(
    """str list dict set bytes int float object tuple frozenset pathlib.Path pathlib.PurePath datetime.datetime
    datetime.date datetime.timedelta collections.Counter collections.deque collections.OrderedDict
    collections.defaultdict re.Pattern re.Match random.Random threading.Thread threading.Lock
    threading.Event queue.Queue logging.Logger argparse.ArgumentParser subprocess.Popen string.Template
    csv.DictReader csv.DictWriter io.StringIO io.IOBase zipfile.ZipFile sqlite3.Connection
    sqlite3.Cursor concurrent.futures.Executor concurrent.futures.Future unittest.TestCase
    hashlib.hash contextlib.ExitStack socket.socket decimal.Decimal""".split()
)
"""Classes whose methods are learnt; other classes are known by their own sentence only."""

MOST_USED: tuple[str, ...] = tuple(
    """abs all any ascii bin bool breakpoint bytearray bytes callable chr classmethod compile complex delattr
    dict dir divmod enumerate eval exec filter float format frozenset getattr globals hasattr hash help
    hex id input int isinstance issubclass iter len list locals map max memoryview min next object oct
    open ord pow print property range repr reversed round set setattr slice sorted staticmethod str sum
    super tuple type vars zip
    str.split str.join str.strip str.lstrip str.rstrip str.replace str.startswith str.endswith str.find
    str.index str.count str.upper str.lower str.title str.capitalize str.casefold str.format
    str.isdigit str.isalpha str.isalnum str.isspace str.encode str.splitlines str.partition str.zfill
    str.center str.ljust str.rjust str.removeprefix str.removesuffix str.rsplit str.translate
    bytes.decode list.sort list.append dict.get dict.items dict.keys dict.values dict.pop dict.update
    dict.setdefault dict.fromkeys dict.popitem dict.copy dict.clear
    os.path.join os.path.exists os.path.basename os.path.dirname os.path.splitext os.path.abspath
    os.path.isfile os.path.isdir os.path.expanduser os.path.getsize os.path.realpath os.path.split
    os.listdir os.makedirs os.mkdir os.remove os.rename os.getcwd os.chdir os.walk os.environ os.getenv
    os.scandir os.stat os.rmdir os.unlink os.replace os.getpid os.cpu_count os.urandom os.chmod os.kill
    os.system sys.argv sys.exit sys.path sys.stdin sys.stdout sys.version sys.modules sys.platform
    sys.getsizeof sys.executable re.match re.search re.sub re.findall re.finditer re.compile re.split
    re.fullmatch re.escape re.Match.group re.Match.groups json.loads json.dumps json.load json.dump
    json.JSONDecodeError pathlib.Path pathlib.Path.exists pathlib.Path.mkdir pathlib.Path.read_text
    pathlib.Path.write_text pathlib.Path.glob pathlib.Path.rglob pathlib.Path.iterdir
    pathlib.Path.is_file pathlib.Path.is_dir pathlib.Path.unlink pathlib.Path.resolve pathlib.Path.home
    pathlib.Path.cwd pathlib.Path.open pathlib.PurePath.name pathlib.PurePath.suffix
    pathlib.PurePath.stem pathlib.PurePath.parent
    shutil.copy shutil.copy2 shutil.copyfile shutil.copytree shutil.rmtree shutil.move shutil.which
    shutil.disk_usage shutil.make_archive shutil.unpack_archive shutil.get_terminal_size
    subprocess.run subprocess.Popen subprocess.check_output subprocess.check_call
    subprocess.CalledProcessError datetime.datetime.now datetime.datetime.strftime
    datetime.datetime.strptime datetime.timedelta datetime.date datetime.datetime datetime.date.today
    datetime.datetime.fromisoformat datetime.datetime.isoformat datetime.datetime.timestamp
    time.time time.sleep time.perf_counter time.monotonic time.strftime time.localtime time.gmtime
    collections.Counter collections.deque collections.defaultdict collections.namedtuple
    collections.OrderedDict collections.ChainMap collections.Counter.most_common
    collections.deque.append collections.deque.appendleft collections.deque.popleft
    itertools.chain itertools.product itertools.permutations itertools.combinations itertools.count
    itertools.cycle itertools.repeat itertools.islice itertools.groupby itertools.accumulate
    itertools.zip_longest itertools.takewhile itertools.dropwhile itertools.starmap itertools.tee
    functools.lru_cache functools.cache functools.partial functools.reduce functools.wraps
    functools.cached_property functools.singledispatch functools.total_ordering functools.cmp_to_key
    random.choice random.choices random.sample random.shuffle random.randint random.random
    random.uniform random.seed random.randrange random.gauss math.sqrt math.floor math.ceil math.gcd
    math.factorial math.log math.log10 math.log2 math.exp math.pow math.sin math.cos math.tan math.pi
    math.isclose math.hypot math.prod math.comb math.perm math.isnan math.inf math.degrees math.radians
    math.trunc math.fsum math.fabs statistics.mean statistics.median statistics.stdev statistics.mode
    string.ascii_letters string.digits string.punctuation textwrap.wrap textwrap.fill textwrap.dedent
    textwrap.indent textwrap.shorten logging.basicConfig logging.getLogger logging.info logging.warning
    logging.debug logging.error logging.exception argparse.ArgumentParser
    argparse.ArgumentParser.add_argument argparse.ArgumentParser.parse_args csv.reader csv.writer
    csv.DictReader csv.DictWriter sqlite3.connect threading.Thread threading.Lock threading.Event
    threading.Timer threading.Thread.start threading.Thread.join queue.Queue asyncio.run asyncio.sleep
    asyncio.gather asyncio.create_task asyncio.wait_for urllib.request.urlopen urllib.parse.urlparse
    urllib.parse.quote urllib.parse.urlencode urllib.parse.urljoin tempfile.TemporaryDirectory
    tempfile.NamedTemporaryFile tempfile.mkdtemp tempfile.mkstemp tempfile.gettempdir glob.glob glob.iglob
    fnmatch.fnmatch hashlib.sha256 hashlib.md5 hashlib.new base64.b64encode base64.b64decode
    secrets.token_hex secrets.choice secrets.token_urlsafe uuid.uuid4 copy.copy copy.deepcopy pickle.dumps
    pickle.loads pickle.dump pickle.load enum.Enum enum.auto enum.IntEnum dataclasses.dataclass
    dataclasses.field dataclasses.asdict typing.Optional typing.Union typing.Any typing.NamedTuple
    typing.TypeVar contextlib.contextmanager contextlib.suppress contextlib.closing
    contextlib.redirect_stdout contextlib.ExitStack abc.ABC abc.abstractmethod inspect.signature
    inspect.getsource inspect.getdoc io.StringIO io.BytesIO operator.itemgetter operator.attrgetter
    heapq.heappush heapq.heappop heapq.heapify heapq.nlargest heapq.nsmallest heapq.merge
    bisect.bisect_left bisect.bisect_right bisect.bisect bisect.insort bisect.insort_left
    decimal.Decimal fractions.Fraction struct.pack struct.unpack zipfile.ZipFile tarfile.open gzip.open
    pprint.pprint pprint.pformat traceback.print_exc traceback.format_exc warnings.warn
    calendar.isleap calendar.monthrange getpass.getpass getpass.getuser platform.system shlex.split
    shlex.quote shlex.join configparser.ConfigParser timeit.timeit html.escape html.unescape
    difflib.get_close_matches difflib.SequenceMatcher difflib.unified_diff unittest.TestCase
    multiprocessing.Pool multiprocessing.Process concurrent.futures.ThreadPoolExecutor
    concurrent.futures.ProcessPoolExecutor signal.signal atexit.register zlib.compress
    ValueError TypeError KeyError IndexError AttributeError StopIteration ZeroDivisionError
    FileNotFoundError ImportError OSError RuntimeError NotImplementedError KeyboardInterrupt
    NameError RecursionError AssertionError""".split()
)
"""Objects with most of the weight."""
